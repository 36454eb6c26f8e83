#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/archive.h"

namespace ikbo::transform {

/// Names that no value of a graph has.
class FreshNames {
 public:
  explicit FreshNames(const graph::Graph& graph);
  /// The name itself, or with the first free number behind it; taken from then on.
  std::string fresh(const std::string& wanted);

 private:
  std::set<std::string> taken_;
};

/// A node with one result of the given sizes, contiguous and without a gradient, else like the value `like`. The graph
/// gets the description of its result; the caller places the node.
graph::Node new_node(graph::Graph& graph, FreshNames& names, const std::string& target,
                     std::vector<graph::NamedArgument> inputs, std::vector<graph::Expr> sizes, const std::string& like,
                     std::optional<graph::DType> dtype = std::nullopt);

/// An archive whose graph is written anew, node after node: some are copied, others replaced by what means the same.
/// For the passes in front of the rewriting, which know one batch only.
class GraphEditor {
 public:
  explicit GraphEditor(graph::Archive archive);

 protected:
  const std::vector<graph::Expr>& sizes(const std::string& name) const { return graph_.tensors.at(name).sizes; }
  /// The contents of a constant, or of what shows part of one.
  std::optional<at::Tensor> constant(const std::string& name) const;

  /// A node of its own; returns its value, of the type of `like` where none is given.
  std::string emit(const std::string& target, std::vector<graph::NamedArgument> inputs, std::vector<graph::Expr> sizes,
                   const std::string& like, std::optional<graph::DType> dtype = std::nullopt);
  /// The last node of a replacement: it makes the value that the original did.
  void finish(const graph::Node& original, const std::string& target, std::vector<graph::NamedArgument> inputs);
  void keep(graph::Node node);
  /// A new buffer, in front of what a caller passes.
  std::string buffer(const std::string& wanted, const at::Tensor& contents);

  graph::Archive archive_;
  graph::Graph& graph_;
  std::map<std::string, std::string> targets_;  // of parameters, buffers and constants
  std::map<std::string, graph::Node> makers_;   // of what is written already
  FreshNames names_;
};

}  // namespace ikbo::transform
