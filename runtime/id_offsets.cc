#include "runtime/id_offsets.h"

#include <set>

namespace ikbo::runtime {
namespace {

constexpr std::int64_t kMostOffsets = 4096;  // more than that is a table, not a field's place in one

const graph::Argument* find(const graph::Node& node, const char* name) {
  const graph::Argument* argument = node.find(name);
  return argument == nullptr || std::holds_alternative<graph::NoneArg>(*argument) ? nullptr : argument;
}

// An integer argument, or `otherwise` where it is absent; nothing where it is symbolic.
std::optional<std::int64_t> integer(const graph::Node& node, const char* name, std::int64_t otherwise) {
  const graph::Argument* argument = find(node, name);
  if (argument == nullptr) return otherwise;
  if (const auto* value = std::get_if<std::int64_t>(argument)) return *value;
  return std::nullopt;
}

}  // namespace

IdOffsets::IdOffsets(const graph::Archive& archive) : archive_(archive) {
  for (const graph::InputSpec& spec : archive.program.input_specs) {
    for (const auto* table : {&archive.weights, &archive.constants}) {
      const auto it = table->find(spec.target);
      if (it == table->end()) continue;
      for (const std::string& name : graph::value_names(spec.value)) weights_[name] = &it->second;
    }
  }
  for (const graph::Node& node : archive.program.graph.nodes) {
    const auto names = graph::output_names(node);
    if (names.size() == 1) makers_[names[0]] = &node;
  }
}

std::optional<at::Tensor> IdOffsets::constant(const std::string& value) const {
  if (const auto weight = weights_.find(value); weight != weights_.end()) {
    const graph::TensorMeta& meta = weight->second->meta;
    if (!graph::is_integral(meta.dtype)) return std::nullopt;
    std::int64_t count = 1;
    for (const graph::Expr& size : meta.sizes) {
      const auto entries = size.as_integer();
      if (!entries || *entries < 1 || *entries > kMostOffsets) return std::nullopt;
      count *= *entries;
    }
    if (count > kMostOffsets) return std::nullopt;
    return graph::weight_tensor(*weight->second).to(at::kLong);
  }
  const auto maker = makers_.find(value);
  if (maker == makers_.end()) return std::nullopt;
  static const std::set<std::string> kSame{"_to_copy", "to",     "clone",          "contiguous",
                                           "alias",    "detach", "lift_fresh_copy"};
  const graph::Node& node = *maker->second;
  const graph::Argument* self = find(node, "self");
  const auto* operand = self != nullptr ? std::get_if<graph::TensorArg>(self) : nullptr;
  const auto meta = archive_.program.graph.tensors.find(value);
  constexpr std::string_view kPrefix = "torch.ops.aten.";
  if (operand == nullptr || meta == archive_.program.graph.tensors.end() || !node.target.starts_with(kPrefix) ||
      !graph::is_integral(meta->second.dtype)) {
    return std::nullopt;
  }
  const auto base = constant(operand->name);
  if (!base) return std::nullopt;
  const std::string name = node.target.substr(kPrefix.size(), node.target.find('.', kPrefix.size()) - kPrefix.size());
  if (kSame.contains(name)) return base;
  if (name == "view" || name == "reshape" || name == "_unsafe_view" || name == "unsqueeze" || name == "flatten") {
    std::vector<std::int64_t> sizes;
    for (const graph::Expr& size : meta->second.sizes) {
      const auto entries = size.as_integer();
      if (!entries) return std::nullopt;
      sizes.push_back(*entries);
    }
    return base->reshape(sizes);
  }
  if (name == "slice") {
    const auto dim = integer(node, "dim", 0);
    const auto start = integer(node, "start", 0);
    const auto end = integer(node, "end", INT64_MAX);
    const auto step = integer(node, "step", 1);
    if (!dim || !start || !end || !step) return std::nullopt;
    return base->slice(*dim, *start, *end, *step);
  }
  return std::nullopt;
}

std::optional<std::vector<std::int64_t>> IdOffsets::along_last(const std::string& value) const {
  const auto found = constant(value);
  if (!found || found->numel() == 0) return std::nullopt;
  const std::int64_t last = found->dim() == 0 ? 1 : found->size(-1);
  if (found->numel() != last) return std::nullopt;
  const at::Tensor flat = found->reshape({-1}).contiguous();
  const auto* numbers = flat.const_data_ptr<std::int64_t>();
  return std::vector<std::int64_t>(numbers, numbers + last);
}

}  // namespace ikbo::runtime
