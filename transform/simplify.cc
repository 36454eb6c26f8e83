// What costs time and says nothing new: dropped before the rewriting, or joined with its neighbour after it.
#include "transform/simplify.h"

#include <algorithm>
#include <set>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Graph;
using graph::Node;
using graph::TensorArg;

// The operand that the operator gives back as it is; nothing where it may do more.
const std::string* identity_of(const Graph& graph, const Node& node) {
  static const std::set<std::string, std::less<>> kPass{
      "alias", "detach",   "clone", "contiguous", "dropout", "feature_dropout", "alpha_dropout",  "to",
      "view",  "_to_copy", "slice", "reshape",    "expand",  "_unsafe_view",    "lift_fresh_copy"};
  if (!kPass.contains(aten_name(node.target)) || is_random(node) || node.outputs.size() != 1) return nullptr;
  const auto* result = std::get_if<TensorArg>(&node.outputs[0]);
  const Argument* operand = node.find("self") != nullptr ? node.find("self") : node.find("input");
  const auto* self = operand != nullptr ? std::get_if<TensorArg>(operand) : nullptr;
  if (result == nullptr || self == nullptr) return nullptr;
  const graph::TensorMeta& before = graph.tensors.at(self->name);
  const graph::TensorMeta& after = graph.tensors.at(result->name);
  const bool same = before.dtype == after.dtype && before.device == after.device && before.sizes == after.sizes &&
                    before.strides == after.strides;
  // A complex value may be a conjugate that is not computed yet.
  const bool complex =
      !graph::is_floating(before.dtype) && !graph::is_integral(before.dtype) && before.dtype != graph::DType::kBool;
  if (!same || complex) return nullptr;
  if (node.target == "torch.ops.aten.slice.Tensor") {
    if (node.find("step") != nullptr && integer_argument(node, "step") != 1) return nullptr;
  }
  return node.target == "torch.ops.aten.view.dtype" ? nullptr : &self->name;
}

// Gives the same result whenever it is called with the same operands.
bool is_repeatable(const Graph& graph, const Node& node) {
  const std::string name = aten_name(node.target);
  if (name.empty() || name.starts_with("empty") || name.starts_with("new_empty") || is_random(node)) return false;
  const auto results = graph::output_names(node);
  const bool tensors =
      std::all_of(results.begin(), results.end(), [&](const auto& r) { return graph.tensors.contains(r); });
  const bool plain = std::none_of(node.inputs.begin(), node.inputs.end(),
                                  [](const auto& a) { return std::holds_alternative<graph::RawArg>(a.value); });
  return !results.empty() && tensors && plain;
}

bool same_call(const Node& a, const Node& b) {
  return std::equal(a.inputs.begin(), a.inputs.end(), b.inputs.begin(), b.inputs.end(),
                    [](const auto& x, const auto& y) { return x.name == y.name && x.value == y.value; });
}

}  // namespace

Reads::Reads(const Graph& graph) : graph_(graph) {
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const std::string& name : graph::input_names(graph.nodes[i])) readers_[name].push_back(i);
  }
  for (const Argument& out : graph.outputs) {
    for (const std::string& name : graph::value_names(out)) outputs_.insert(name);
  }
}

const Node* Reads::only_reader(const std::string& value) const {
  const auto it = readers_.find(value);
  if (outputs_.contains(value) || it == readers_.end() || it->second.size() != 1) return nullptr;
  return &graph_.nodes[it->second[0]];
}

void Renaming::apply(Argument& argument) const {
  const auto rename = [&](std::string& name) {
    if (const auto it = names.find(name); it != names.end()) name = it->second;
  };
  if (auto* t = std::get_if<TensorArg>(&argument)) {
    rename(t->name);
  } else if (auto* list = std::get_if<graph::TensorListArg>(&argument)) {
    for (std::string& name : list->names) rename(name);
  } else if (auto* optional = std::get_if<graph::OptionalTensorListArg>(&argument)) {
    for (auto& name : optional->names) {
      if (name) rename(*name);
    }
  }
}

void Renaming::drop(Graph& graph, const std::set<std::string>& nodes) const {
  if (nodes.empty()) return;
  for (const Node& node : graph.nodes) {
    if (!nodes.contains(node.name)) continue;
    for (const std::string& name : graph::output_names(node)) graph.tensors.erase(name);
  }
  std::erase_if(graph.nodes, [&](const Node& n) { return nodes.contains(n.name); });
  for (Node& node : graph.nodes) {
    for (graph::NamedArgument& a : node.inputs) apply(a.value);
  }
  for (Argument& out : graph.outputs) apply(out);
}

void simplify(Graph& graph) {
  std::set<std::string> outputs;
  for (const Argument& out : graph.outputs) {
    for (const std::string& name : graph::value_names(out)) outputs.insert(name);
  }
  Renaming renaming;
  std::map<std::string, std::vector<Node>> made;  // by operator and operands
  std::vector<Node> kept;
  for (Node& node : graph.nodes) {
    for (graph::NamedArgument& a : node.inputs) renaming.apply(a.value);
    const auto results = graph::output_names(node);
    const bool is_output =
        std::any_of(results.begin(), results.end(), [&](const auto& r) { return outputs.contains(r); });
    if (!is_output) {
      if (const std::string* self = identity_of(graph, node)) {
        renaming.names[results[0]] = *self;
        continue;
      }
      if (is_repeatable(graph, node)) {
        std::string key = node.target;
        for (const std::string& name : graph::input_names(node)) key += " " + name;
        auto& candidates = made[key];
        const auto equal =
            std::find_if(candidates.begin(), candidates.end(), [&](const Node& n) { return same_call(n, node); });
        if (equal != candidates.end()) {
          const auto first = graph::output_names(*equal);
          for (std::size_t i = 0; i < results.size() && i < first.size(); ++i) renaming.names[results[i]] = first[i];
          continue;
        }
        candidates.push_back(node);
      }
    }
    kept.push_back(std::move(node));
  }
  graph.nodes = std::move(kept);
}

void fuse_activations(Builder& builder) {
  static const std::map<std::string, std::string> kActivations{{"torch.ops.aten.relu.default", "relu"},
                                                               {"torch.ops.aten.sigmoid.default", "sigmoid"},
                                                               {"torch.ops.aten.tanh.default", "tanh"},
                                                               {"torch.ops.aten.silu.default", "silu"}};
  const Reads reads(builder.graph);
  Renaming renaming;
  std::set<std::string> fused;
  for (Node& node : builder.graph.nodes) {
    if (node.target != "torch.ops.ikbo.linear.default") continue;
    const Node* next = reads.only_reader(graph::output_names(node)[0]);
    if (next != nullptr && next->target == "torch.ops.aten.reshape.default") {
      next = reads.only_reader(graph::output_names(*next)[0]);
    }
    const auto activation = next == nullptr ? kActivations.end() : kActivations.find(next->target);
    if (activation == kActivations.end()) continue;
    const auto argument =
        std::find_if(node.inputs.begin(), node.inputs.end(), [](const auto& a) { return a.name == "activation"; });
    if (argument == node.inputs.end() || argument->value != Argument(std::string("none"))) continue;
    argument->value = activation->second;
    renaming.names[graph::output_names(*next)[0]] = graph::input_names(*next)[0];
    fused.insert(next->name);
  }
  renaming.drop(builder.graph, fused);
}

}  // namespace ikbo::transform
