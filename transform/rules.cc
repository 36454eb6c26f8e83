#include "transform/rules.h"

#include <algorithm>
#include <set>

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;

const std::string* tensor_argument(const graph::Node& node, std::string_view argument) {
  const Argument* a = node.find(std::string(argument));
  const auto* t = a != nullptr ? std::get_if<graph::TensorArg>(a) : nullptr;
  return t != nullptr ? &t->name : nullptr;
}

std::optional<std::int64_t> integer_argument(const graph::Node& node, std::string_view argument) {
  const Argument* a = node.find(std::string(argument));
  if (a == nullptr) return std::nullopt;
  if (const auto* i = std::get_if<std::int64_t>(a)) return *i;
  const auto* s = std::get_if<graph::SymInt>(a);
  const auto* i = s != nullptr ? std::get_if<std::int64_t>(&s->value) : nullptr;
  return i != nullptr ? std::optional(*i) : std::nullopt;
}

std::optional<bool> boolean_argument(const graph::Node& node, std::string_view argument) {
  const Argument* a = node.find(std::string(argument));
  if (a == nullptr) return std::nullopt;
  if (const auto* b = std::get_if<bool>(a)) return *b;
  const auto* s = std::get_if<graph::SymBoolArg>(a);
  const auto* b = s != nullptr ? std::get_if<bool>(&s->value) : nullptr;
  return b != nullptr ? std::optional(*b) : std::nullopt;
}

bool is_written_with(const graph::Json& scalar, const std::string& symbol) {
  // {"as_expr": {"expr_str": "Eq(Symbol('u0', integer=True), Integer(3))", ...}}: relations and fractions are no Expr.
  return scalar.dump().find("Symbol('" + symbol + "'") != std::string::npos;
}

bool keeps_values(std::string_view op) {
  return one_of(op, {"alias", "detach", "clone", "contiguous", "lift_fresh_copy"});
}

bool keeps_order(std::string_view op) {
  return keeps_values(op) || one_of(op, {"view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze"});
}

const std::string* RuleInput::tensor(std::string_view argument) const {
  return tensor_argument(node_, argument);
}

std::vector<std::string> RuleInput::tensors(std::string_view argument) const {
  const Argument* a = find(argument);
  if (a == nullptr) return {};
  std::vector<std::string> names;
  for (std::string& name : graph::value_names(*a)) {
    if (graph_.tensors.contains(name)) names.push_back(std::move(name));
  }
  return names;
}

std::vector<std::string> RuleInput::operands() const {
  std::vector<std::string> names;
  for (std::string& name : graph::input_names(node_)) {
    if (graph_.tensors.contains(name)) names.push_back(std::move(name));
  }
  return names;
}

std::vector<std::string> RuleInput::results() const {
  std::vector<std::string> names;
  for (std::string& name : graph::output_names(node_)) {
    if (graph_.tensors.contains(name)) names.push_back(std::move(name));
  }
  return names;
}

const Batch* RuleInput::batch(const std::string& value) const {
  const auto it = batched_.find(value);
  return it == batched_.end() ? nullptr : &it->second;
}

const Batch* RuleInput::batch_of(std::string_view argument) const {
  const std::string* t = tensor(argument);
  return t != nullptr ? batch(*t) : nullptr;
}

bool RuleInput::shared(std::string_view argument) const {
  const auto names = tensors(argument);
  return std::all_of(names.begin(), names.end(), [&](const std::string& n) { return batch(n) == nullptr; });
}

std::optional<std::int64_t> RuleInput::integer(std::string_view argument) const {
  if (const auto constant = integer_argument(node_, argument)) return constant;
  const Argument* a = find(argument);
  const auto* s = a != nullptr ? std::get_if<graph::SymInt>(a) : nullptr;
  if (s == nullptr) return std::nullopt;
  const auto it = graph_.sym_ints.find(*s->name());
  return it != graph_.sym_ints.end() ? it->second.as_integer() : std::nullopt;
}

std::optional<std::vector<std::int64_t>> RuleInput::integers(std::string_view argument) const {
  const Argument* a = find(argument);
  if (a == nullptr) return std::nullopt;
  if (const auto* list = std::get_if<std::vector<std::int64_t>>(a)) return *list;
  if (const auto* list = std::get_if<graph::SymIntListArg>(a)) {
    std::vector<std::int64_t> values;
    for (const graph::SymInt& s : list->values) {
      if (s.name() != nullptr) return std::nullopt;
      values.push_back(std::get<std::int64_t>(s.value));
    }
    return values;
  }
  if (const auto i = integer(argument)) return std::vector<std::int64_t>{*i};
  return std::nullopt;
}

std::optional<bool> RuleInput::boolean(std::string_view argument) const {
  return boolean_argument(node_, argument);
}

std::optional<double> RuleInput::number(std::string_view argument) const {
  const Argument* a = find(argument);
  if (a == nullptr) return std::nullopt;
  if (const auto* d = std::get_if<double>(a)) return *d;
  if (const auto i = integer(argument)) return static_cast<double>(*i);
  return std::nullopt;
}

std::optional<int> RuleInput::dim(std::string_view argument, int rank) const {
  const auto d = integer(argument);
  if (!d || *d < -rank || *d >= rank) return std::nullopt;
  return static_cast<int>(*d < 0 ? *d + rank : *d);
}

std::string aten_name(std::string_view target) {
  constexpr std::string_view kPrefix = "torch.ops.aten.";
  if (!target.starts_with(kPrefix)) return {};
  target.remove_prefix(kPrefix.size());
  return std::string(target.substr(0, target.find('.')));
}

std::string aten_overload(std::string_view target) {
  const std::size_t dot = target.rfind('.');
  return dot == std::string_view::npos ? std::string() : std::string(target.substr(dot + 1));
}

bool one_of(std::string_view op, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), op) != names.end();
}

const Rule* find_rule(std::string_view target) {
  static const RuleTable table = [] {
    RuleTable t;
    add_pointwise_rules(t);
    add_shape_rules(t);
    add_reduction_rules(t);
    add_matmul_rules(t);
    add_lookup_rules(t);
    return t;
  }();
  const auto it = table.find(aten_name(target));
  return it == table.end() ? nullptr : &it->second;
}

RuleResult broadcasting_rows(const RuleInput& in, const std::vector<std::string>& operands) {
  const auto results = in.results();
  if (results.empty()) return std::nullopt;
  const int rank = in.rank(results[0]);
  std::optional<Batch> batch;
  for (const std::string& name : operands) {
    if (const Batch* b = in.batch(name)) {
      const Batch aligned{b->axis + rank - in.rank(name), b->inner};
      if (batch && !(*batch == aligned)) return std::nullopt;
      batch = aligned;
    }
  }
  if (!batch || batch->axis < 0) return std::nullopt;
  for (const std::string& name : operands) {
    if (in.batch(name) != nullptr) continue;
    const int axis = batch->axis - (rank - in.rank(name));  // a shared operand spans the batch axis with one entry
    if (axis >= 0 && !in.meta(name).sizes[static_cast<std::size_t>(axis)].is_integer(1)) return std::nullopt;
  }
  return std::vector<std::optional<Batch>>(results.size(), batch);
}

RuleResult apply_rule(const RuleInput& in, std::string& why) {
  const graph::Node& node = in.node();
  if (is_random(node)) {
    why = "draws random numbers";
    return std::nullopt;
  }
  const Rule* rule = find_rule(node.target);
  if (rule == nullptr) {
    why = "no rule says that its rows are independent";
    return std::nullopt;
  }
  RuleResult result = rule->rows(in);
  const auto names = in.results();
  if (!result || result->size() != names.size()) {
    why = "its rows are not independent as it is called here";
    return std::nullopt;
  }
  // The archive's own symbolic sizes must agree: the batch is on the axis that the rule names, and nowhere else.
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& sizes = in.meta(names[i]).sizes;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const bool on_axis = (*result)[i] && (*result)[i]->axis == static_cast<int>(d);
      for (const std::string& symbol : sizes[d].symbols()) {
        if (symbol.starts_with("u")) {
          why = "its size depends on data";
          return std::nullopt;
        }
      }
      const auto inner = sizes[d].multiple_of(in.batch_symbol());
      if (on_axis ? !(inner && *inner == (*result)[i]->inner) : sizes[d].depends_on(in.batch_symbol())) {
        why = "its sizes do not show the batch where it is expected";
        return std::nullopt;
      }
    }
    if ((*result)[i] && (*result)[i]->axis >= static_cast<int>(sizes.size())) {
      why = "its sizes do not show the batch where it is expected";
      return std::nullopt;
    }
  }
  return result;
}

bool is_in_place(std::string_view target) {
  const std::string name = aten_name(target);
  return name.size() > 1 && name.back() == '_' && !name.ends_with("__");
}

bool is_random(const graph::Node& node) {
  static const std::set<std::string, std::less<>> kAlways{"rand",
                                                          "randn",
                                                          "randint",
                                                          "rand_like",
                                                          "randn_like",
                                                          "randint_like",
                                                          "randperm",
                                                          "bernoulli",
                                                          "normal",
                                                          "multinomial",
                                                          "poisson",
                                                          "uniform",
                                                          "exponential",
                                                          "rrelu_with_noise",
                                                          "normal_functional",
                                                          "geometric",
                                                          "log_normal",
                                                          "cauchy",
                                                          "random"};
  const std::string name = aten_name(node.target);
  if (kAlways.contains(name)) return true;
  const auto flag = [&](const char* argument) { return boolean_argument(node, argument) == true; };
  if (name.find("dropout") != std::string::npos) return flag("train") || node.find("train") == nullptr;
  if (name == "rrelu") return flag("training");
  if (name == "scaled_dot_product_attention") {
    const Argument* p = node.find("dropout_p");
    const auto* value = p != nullptr ? std::get_if<double>(p) : nullptr;
    return value != nullptr && *value != 0.0;
  }
  return false;
}

}  // namespace ikbo::transform
