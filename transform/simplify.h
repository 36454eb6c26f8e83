#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "transform/builder.h"

namespace ikbo::transform {

/// Drops operators that change nothing (dropout that is off, copies that lie in memory like what they copy, casts to
/// the same type, views of the same sizes), and computes equal operators once. What is an output keeps its operator.
void simplify(graph::Graph& graph);

/// A batch norm with running statistics that alone follows a linear layer goes into the layer's weight and bias.
void fold_norms(const graph::Archive& source, Builder& builder);

/// An activation that alone follows an ikbo::linear becomes the operator's own, computed before the result is written.
void fuse_activations(Builder& builder);

/// Who reads which value of a graph.
class Reads {
 public:
  explicit Reads(const graph::Graph& graph);
  bool is_read(const std::string& value) const { return outputs_.contains(value) || readers_.contains(value); }
  /// The one node that reads the value; nullptr where there are others, or where the value is an output.
  const graph::Node* only_reader(const std::string& value) const;

 private:
  const graph::Graph& graph_;
  std::map<std::string, std::vector<std::size_t>> readers_;
  std::set<std::string> outputs_;
};

/// Values that are read under another name from now on.
struct Renaming {
  std::map<std::string, std::string> names;  // old -> new
  void apply(graph::Argument& argument) const;
  /// Removes nodes, and renames what they made wherever it is read.
  void drop(graph::Graph& graph, const std::set<std::string>& nodes) const;
};

}  // namespace ikbo::transform
