#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"

namespace ikbo::transform {

/// The batch at which a node of the new program runs.
enum class Where { kShared, kUser, kCandidate };

/// The program under construction: values, nodes, sizes and new parameters. Sizes are written with the symbols of the
/// new program: the original's batch symbol now means B_cand, `user_symbol` means B_user.
class Builder {
 public:
  Builder(std::string candidate_symbol, std::string user_symbol)
      : candidate_symbol_(std::move(candidate_symbol)), user_symbol_(std::move(user_symbol)) {}

  graph::Graph graph;

  const std::string& candidate_symbol() const { return candidate_symbol_; }
  const std::string& user_symbol() const { return user_symbol_; }

  /// A name that no value has yet: `wanted`, or with a number behind it.
  std::string fresh(const std::string& wanted);
  void reserve(const std::string& name) { taken_.insert(name); }

  /// An original size at the given batch.
  graph::Expr at(const graph::Expr& original, Where where) const;
  graph::TensorMeta at(const graph::TensorMeta& original, Where where) const;

  /// A size that can be read off an input's dimension.
  void anchor(const std::string& symbol, const std::string& input, int dim) {
    anchors_.try_emplace(symbol, input, dim);
  }
  /// Every symbol of the expression can be read off an input.
  bool computable(const graph::Expr& expression) const;
  /// An integer or the name of a symbolic integer; nodes that compute it are made once.
  graph::SymInt size(const graph::Expr& expression);
  graph::Argument sizes(const std::vector<graph::Expr>& expressions);

  /// Appends a node with one tensor result and returns the result's name.
  std::string emit(const std::string& target, std::vector<graph::NamedArgument> inputs, const std::string& name,
                   graph::TensorMeta meta, graph::Role role, const graph::Node* origin = nullptr,
                   std::string note = {});
  /// Appends a node as it is.
  void append(graph::Node node, graph::Role role, std::string note = {});

  // ATen operators that the rewrites insert. Sizes are those of the new program. A view of a view is one of what the
  // first one shows; neighbouring slices put together are one slice.
  std::string reshape(const std::string& value, const std::vector<graph::Expr>& sizes, graph::Role role);
  std::string cat(const std::vector<std::string>& values, int dim, graph::Role role);  // the same one is made once
  /// The same with rows, along the last dimension, that begin at multiples of 16 bytes: ikbo::aligned_cat where they
  /// are of a type of 16 bits and a fixed length that is no such multiple. One value alone stays as it is.
  std::string aligned_cat(const std::vector<std::string>& values, int dim, graph::Role role);
  /// What such an ikbo::aligned_cat had better be given, so that nothing is written twice: of values that are
  /// concatenations or stacks along `dim` themselves, the operands.
  std::vector<std::string> taken_apart(const std::vector<std::string>& values, int dim, graph::Role role);
  std::string slice(const std::string& value, int dim, std::int64_t from, std::int64_t to, graph::Role role);
  std::string expand(const std::string& value, const std::vector<graph::Expr>& sizes, graph::Role role);
  /// Undoes a transposition of the same dimensions instead of adding one.
  std::string transpose(const std::string& value, int dim0, int dim1, graph::Role role);
  const graph::TensorMeta& meta(const std::string& value) const { return graph.tensors.at(value); }

  /// A parameter that the transform makes; a graph input. `wanted` names it in the state dict. Its rows keep their
  /// stride where `keep_strides`.
  std::string parameter(const std::string& wanted, const at::Tensor& contents, bool keep_strides = false);

  struct NewParameter {
    std::string value;
    std::string target;
    graph::Weight weight;
  };
  const std::vector<NewParameter>& parameters() const { return parameters_; }
  graph::Role role(const std::string& node) const { return roles_.at(node); }
  std::string note(const std::string& node) const;

 private:
  struct Slice {
    std::string source;
    int dim = 0;
    std::int64_t from = 0;
    std::int64_t to = 0;
  };
  std::optional<Slice> neighbours(const std::vector<std::string>& values, int dim) const;  // slices, as one
  // The operands of the concatenation or the stack along `dim` that `value` is, as values of its rank; nothing where it
  // is neither.
  std::vector<std::string> concatenated(const std::string& value, int dim, graph::Role role);
  const graph::Node* maker(const std::string& value) const;
  std::vector<graph::Expr> sizes_of_cat(const std::vector<std::string>& values, int dim) const;
  std::string size_node(const std::string& target, const graph::SymInt& a, const graph::SymInt& b,
                        const graph::Expr& value);

  std::string candidate_symbol_;
  std::string user_symbol_;
  std::set<std::string> taken_;
  std::map<std::string, std::pair<std::string, int>> anchors_;
  std::map<std::string, std::string> size_values_;  // srepr -> value
  std::map<std::pair<int, std::vector<std::string>>, std::string> cats_;
  std::map<std::pair<int, std::vector<std::string>>, std::string> aligned_cats_;
  std::map<std::string, std::string> reshaped_;  // value -> what it is a reshape of
  std::map<std::string, Slice> slices_;
  std::map<std::string, graph::Role> roles_;  // by node name
  std::map<std::string, std::string> notes_;
  std::vector<NewParameter> parameters_;
};

}  // namespace ikbo::transform
