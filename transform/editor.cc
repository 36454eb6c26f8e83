#include "transform/editor.h"

#include <algorithm>

#include "graph/error.h"
#include "transform/rules.h"

namespace ikbo::transform {

using graph::Expr;
using graph::Node;
using graph::TensorArg;

FreshNames::FreshNames(const graph::Graph& graph) {
  for (const auto& [name, meta] : graph.tensors) taken_.insert(name);
  for (const auto& [name, e] : graph.sym_ints) taken_.insert(name);
}

std::string FreshNames::fresh(const std::string& wanted) {
  std::string name = wanted;
  for (int i = 1; !taken_.insert(name).second; ++i) name = fmt::format("{}_{}", wanted, i);
  return name;
}

Node new_node(graph::Graph& graph, FreshNames& names, const std::string& target,
              std::vector<graph::NamedArgument> inputs, std::vector<Expr> sizes, const std::string& like,
              std::optional<graph::DType> dtype) {
  Node node;
  node.target = target;
  node.inputs = std::move(inputs);
  node.name = names.fresh(like + "_" + aten_name(target));
  node.outputs = {TensorArg{node.name}};
  graph::TensorMeta meta = graph.tensors.at(like);
  meta.strides = graph::contiguous_strides(sizes);
  meta.sizes = std::move(sizes);
  meta.storage_offset = 0;
  meta.requires_grad = false;
  meta.dtype = dtype.value_or(meta.dtype);
  graph.tensors.emplace(node.name, std::move(meta));
  return node;
}

GraphEditor::GraphEditor(graph::Archive archive)
    : archive_(std::move(archive)), graph_(archive_.program.graph), names_(graph_) {
  for (const graph::InputSpec& spec : archive_.program.input_specs) {
    if (const auto* t = std::get_if<TensorArg>(&spec.value); t != nullptr && !spec.target.empty()) {
      targets_[t->name] = spec.target;
    }
  }
}

std::optional<at::Tensor> GraphEditor::constant(const std::string& name) const {
  if (const auto target = targets_.find(name); target != targets_.end()) {
    for (const auto* table : {&archive_.weights, &archive_.constants}) {
      if (const auto it = table->find(target->second); it != table->end()) return graph::weight_tensor(it->second);
    }
    return std::nullopt;
  }
  const auto maker = makers_.find(name);
  if (maker == makers_.end()) return std::nullopt;
  const Node& node = maker->second;
  const std::string op = aten_name(node.target);
  const auto names = graph::input_names(node);
  if (names.size() != 1) return std::nullopt;
  if (!keeps_values(op) && !one_of(op, {"select", "unsqueeze", "t"})) return std::nullopt;
  auto base = constant(names[0]);
  if (base && op == "t" && base->dim() == 2) return base->transpose(0, 1);
  if (!base || (op != "select" && op != "unsqueeze")) return op == "t" ? std::nullopt : base;
  const auto dim = integer_argument(node, "dim");
  const auto index = integer_argument(node, "index");
  if (!dim) return std::nullopt;
  if (op == "unsqueeze") return base->unsqueeze(*dim);
  if (!index) return std::nullopt;
  return base->select(*dim, *index);
}

std::string GraphEditor::emit(const std::string& target, std::vector<graph::NamedArgument> inputs,
                              std::vector<Expr> sizes, const std::string& like, std::optional<graph::DType> dtype) {
  keep(new_node(graph_, names_, target, std::move(inputs), std::move(sizes), like, dtype));
  return graph_.nodes.back().name;
}

void GraphEditor::finish(const Node& original, const std::string& target, std::vector<graph::NamedArgument> inputs) {
  Node node = original;
  node.target = target;
  node.inputs = std::move(inputs);
  keep(std::move(node));
}

void GraphEditor::keep(Node node) {
  const auto results = graph::output_names(node);
  if (results.size() == 1) makers_[results[0]] = node;
  graph_.nodes.push_back(std::move(node));
}

std::string GraphEditor::buffer(const std::string& wanted, const at::Tensor& contents) {
  graph::InputSpec spec;
  spec.kind = graph::InputKind::kBuffer;
  spec.target = names_.fresh(wanted);
  spec.value = TensorArg{spec.target};
  const graph::Weight weight = graph::make_weight(contents, /*is_parameter=*/false);
  graph_.tensors.emplace(spec.target, weight.meta);
  archive_.weights.emplace(spec.target, weight);
  targets_[spec.target] = spec.target;
  auto& specs = archive_.program.input_specs;
  const auto at = std::find_if(specs.begin(), specs.end(), [](const graph::InputSpec& s) {
    return s.kind != graph::InputKind::kParameter && s.kind != graph::InputKind::kBuffer;
  });
  graph_.inputs.insert(graph_.inputs.begin() + (at - specs.begin()), TensorArg{spec.target});
  std::string name = spec.target;
  specs.insert(at, std::move(spec));
  return name;
}

}  // namespace ikbo::transform
