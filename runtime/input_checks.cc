#include "runtime/input_checks.h"

#include <c10/core/Device.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "graph/archive.h"
#include "graph/error.h"
#include "graph/jagged.h"

namespace ikbo::runtime {

InputChecks::InputChecks(const graph::Program& program, const std::vector<graph::JaggedInput>& jagged,
                         const c10::Device& device, bool float64)
    : device_(device), float64_(float64) {
  std::map<std::string, int> index;
  std::map<std::string, std::size_t> positions;
  for (const graph::UserInput& user : graph::user_inputs(program)) {
    Input input;
    input.name = user.name;
    positions.emplace(user.value, inputs_.size());
    const auto meta = program.graph.tensors.find(user.value);
    if (meta == program.graph.tensors.end()) {
      input.checked = false;
      inputs_.push_back(std::move(input));
      continue;
    }
    input.type = graph::scalar_type(meta->second.dtype);
    input.expected = graph::describe(meta->second);
    for (const graph::Expr& size : meta->second.sizes) {
      Dim dim;
      const std::set<std::string> names = size.symbols();
      if (const auto value = size.as_integer()) {
        dim.fixed = *value;
      } else if (names.size() == 1 && size == graph::Expr::symbol(*names.begin())) {
        const auto [entry, added] = index.emplace(*names.begin(), static_cast<int>(symbols_.size()));
        if (added) {
          const auto range = program.ranges.find(*names.begin());
          symbols_.push_back({*names.begin(), range == program.ranges.end() ? graph::Range{} : range->second});
        }
        dim.symbol = entry->second;
      } else {
        dim.expr = size;
        has_expressions_ = true;
      }
      input.dims.push_back(std::move(dim));
    }
    inputs_.push_back(std::move(input));
  }
  const auto position = [&](const std::string& value) {
    const auto found = positions.find(value);
    if (found == positions.end()) fail("the specification names bags '{}', which are no input of the archive", value);
    return found->second;
  };
  for (const graph::JaggedInput& given : jagged) {
    if (device_.type() != c10::kCPU || given.values.empty()) continue;
    Bags bags{given, position(given.offsets), {}};
    bags.names.offsets = inputs_[bags.offsets].name;
    for (std::string& value : bags.names.values) {
      bags.values.push_back(position(value));
      value = inputs_[bags.values.back()].name;
    }
    bags_.push_back(std::move(bags));
  }
}

// An operator trusts offsets, and reads whatever lies where they point.
void InputChecks::check_bags(std::span<const at::Tensor> inputs) const {
  for (const Bags& bags : bags_) {
    const std::int64_t total = inputs[bags.values[0]].size(0);
    for (std::size_t i = 1; i < bags.values.size(); ++i) {
      if (inputs[bags.values[i]].size(0) == total) continue;
      fail("input '{}' has {} values where '{}' has {}, and they are of the same bags ('{}')", bags.names.values[i],
           inputs[bags.values[i]].size(0), bags.names.values[0], total, bags.names.offsets);
    }
    graph::check_offsets(bags.names, inputs[bags.offsets], total);
  }
}

std::string InputChecks::given(const at::Tensor& tensor) const {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("{} [{}]", graph::dtype_name(graph::dtype_of(tensor.scalar_type())),
                     fmt::join(tensor.sizes(), ", "));
}

void InputChecks::bind(int symbol, std::int64_t size, int input, int dim, std::vector<Bound>& bound) const {
  Bound& b = bound[static_cast<std::size_t>(symbol)];
  const Symbol& s = symbols_[static_cast<std::size_t>(symbol)];
  const std::string& name = inputs_[static_cast<std::size_t>(input)].name;
  if (b.value >= 0) {
    if (b.value == size) return;
    fail(
        "input '{}' has size {} in dimension {}, but input '{}' has {} in dimension {}, and the model needs them equal",
        name, size, dim, inputs_[static_cast<std::size_t>(b.input)].name, b.value, b.dim);
  }
  // A lower bound of up to 2 comes from how torch.export tells sizes 0 and 1 apart while it traces; the graph holds for
  // them, and ExportedProgram.module() lets them pass too.
  const bool low = s.range.min && *s.range.min > 2 && size < *s.range.min;
  const bool high = s.range.max && size > *s.range.max;
  if (low || high) {
    fail("input '{}' has size {} in dimension {}, and the model was exported for {} to {}", name, size, dim,
         s.range.min ? *s.range.min : 0, s.range.max ? fmt::format("{}", *s.range.max) : "any");
  }
  b = {size, input, dim};
}

// Sizes such as 2*batch, once the plain symbols are known. A symbol that stands in expressions alone is solved for.
void InputChecks::check_expressions(std::span<const at::Tensor> inputs, std::vector<Bound>& bound) const {
  std::map<std::string, std::int64_t> values;
  for (std::size_t i = 0; i < symbols_.size(); ++i) values[symbols_[i].name] = bound[i].value;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    for (std::size_t d = 0; d < inputs_[i].dims.size(); ++d) {
      const Dim& dim = inputs_[i].dims[d];
      if (dim.fixed >= 0 || dim.symbol >= 0) continue;
      const std::int64_t size = inputs[i].size(static_cast<std::int64_t>(d));
      for (const std::string& name : dim.expr.symbols()) {
        if (values.contains(name)) continue;
        const auto more = (dim.expr - graph::Expr::symbol(name)).as_integer();  // batch + 1
        if (more && size >= *more) values[name] = size - *more;
        const auto factor = dim.expr.multiple_of(name);
        const auto multiple = factor ? factor->evaluate(values) : std::nullopt;
        if (multiple && *multiple > 0 && size % *multiple == 0) values[name] = size / *multiple;
      }
      const auto expected = dim.expr.evaluate(values);
      if (expected && *expected != size) {
        fail("input '{}' has size {} in dimension {}, expected {} = {}", inputs_[i].name, size, d, dim.expr.str(),
             *expected);
      }
      if (!expected && dim.expr.symbols().size() == 1) {
        fail("input '{}' has size {} in dimension {}, expected {}", inputs_[i].name, size, d, dim.expr.str());
      }
    }
  }
}

void InputChecks::check(std::span<const at::Tensor> inputs) const {
  if (inputs.size() != inputs_.size()) {
    std::vector<std::string> names;
    for (const Input& input : inputs_) names.push_back(input.name);
    fail("the model takes {} inputs ({}), {} were given", inputs_.size(), fmt::join(names, ", "), inputs.size());
  }
  std::vector<Bound> bound(symbols_.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = inputs_[i];
    const at::Tensor& tensor = inputs[i];
    if (!tensor.defined()) fail("input '{}' is missing: expected {}", input.name, input.expected);
    if (!input.checked) continue;
    if (tensor.device() != device_) {
      fail("input '{}' is on {}, and the model runs on {}", input.name, tensor.device().str(), device_.str());
    }
    const bool promoted = float64_ && at::isFloatingType(input.type) && tensor.scalar_type() == at::kDouble;
    const bool same_type = tensor.scalar_type() == input.type || promoted;
    if (!same_type || tensor.layout() != c10::kStrided ||
        tensor.dim() != static_cast<std::int64_t>(input.dims.size())) {
      fail("input '{}': expected {}, given {}", input.name, input.expected, given(tensor));
    }
    for (std::size_t d = 0; d < input.dims.size(); ++d) {
      const Dim& dim = input.dims[d];
      const std::int64_t size = tensor.size(static_cast<std::int64_t>(d));
      if (dim.fixed >= 0 && dim.fixed != size) {
        fail("input '{}': expected {}, given {}: dimension {} must be {}", input.name, input.expected, given(tensor), d,
             dim.fixed);
      }
      if (dim.symbol >= 0) bind(dim.symbol, size, static_cast<int>(i), static_cast<int>(d), bound);
    }
  }
  if (has_expressions_) check_expressions(inputs, bound);
  check_bags(inputs);
}

}  // namespace ikbo::runtime
