#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/program.h"
#include "transform/editor.h"
#include "transform/rules.h"

namespace ikbo::transform {

/// How a model spreads request-only rows over its candidates by itself.
struct InnerBroadcast {
  std::string batch;                   // symbol of the candidates' batch
  std::set<std::string> user_symbols;  // of request-only rows that the model looks up through `index`
  std::set<std::string> single;        // request-only inputs whose leading size is 1
  std::set<std::string> batched;       // all other inputs with a batch in front
  std::string index;                   // an input that says which user a candidate belongs to; empty: none
};

/// The general form of a model that broadcasts inside: the same graph over inputs that all have one row a candidate.
///
/// A value is *single* if it is made of inputs with a batch of 1 alone. Its lifted value has B rows where it has one:
/// along `axis`, B * inner entries in place of inner; a single number has B. Two things hold of every step. Where all
/// user rows are equal the lifted value is the single one repeated, and every other value is itself; so expanding,
/// tiling and looking up rows change nothing any more. And a rule says that rows of every lifted value depend on the
/// same rows of its operands alone. Together: row b of the result is what the original gives for that candidate and its
/// user, whoever else is in the batch. What no rule understands is refused, on the candidates' side too: the original
/// sees the candidates of one request, the result those of many.
class GeneralForm {
 public:
  GeneralForm(const graph::Graph& before, InnerBroadcast given);
  /// Throws ikbo::Error, with the operator and the remedy, for what cannot be lifted.
  graph::Graph run();

 private:
  // general_form.cc
  void visit(const graph::Node& node);
  bool follows_index(const graph::Node& node);
  void check_numbers(const graph::Node& node) const;
  void check_outputs() const;
  /// Applies the operator as it is, if its rule holds of the lifted operands.
  bool direct(const graph::Node& node, std::string& why);
  [[noreturn]] void refuse(const graph::Node& node, const std::string& why) const;

  // general_form_steps.cc: what needs more than the operator itself
  bool lookup(const graph::Node& node);
  bool view(const graph::Node& node);
  bool repeat(const graph::Node& node);
  bool meet(const graph::Node& node, std::string& why);
  bool stacked(const graph::Node& node, std::string& why);

  // general_form_products.cc
  bool product(const graph::Node& node, std::string& why);
  bool einsum(const graph::Node& node, std::string& why);

  /// The lifted value with its rows in front of the sizes that it has for one row: [B, ...].
  std::string stack(const std::string& name);
  /// [B, ...] back: the rows go to `axis`, in front of what stands there.
  std::string unstack(const std::string& value, int axis);
  std::string padded(const std::string& stacked, std::size_t rank);
  void bind(const std::string& name, const std::string& value, const Batch& batch);
  /// A single value whose lifted one has its rows in front of all dimensions.
  void bind_stacked(const std::string& name, const std::string& stacked);
  static graph::Expr product_of(const std::vector<graph::Expr>& sizes, std::size_t end);

  // Nodes of the new graph.
  std::string emit(const std::string& target, std::vector<graph::NamedArgument> inputs, std::vector<graph::Expr> sizes,
                   const std::string& like, const Batch& batch);
  std::string reshape(const std::string& value, const std::vector<graph::Expr>& sizes, const Batch& batch);
  std::string expand(const std::string& value, const std::vector<graph::Expr>& sizes, const Batch& batch);
  std::string permute(const std::string& value, const std::vector<std::int64_t>& dims, const Batch& batch);
  graph::Argument size_argument(const std::vector<graph::Expr>& sizes);
  graph::Node translated(const graph::Node& node) const;

  bool is_tensor(const std::string& name) const { return before_.tensors.contains(name); }
  bool has_rows(const std::string& name) const { return batches_.contains(made(name)); }
  bool is_single(const std::string& name) const;
  const std::string& made(const std::string& name) const;
  const std::vector<graph::Expr>& sizes(const std::string& value) const { return graph_.tensors.at(value).sizes; }
  const std::vector<graph::Expr>& old_sizes(const std::string& name) const { return substituted_.at(name); }
  /// Where a value of the original shows the candidates' batch.
  std::optional<Batch> shown_batch(const std::string& name) const;
  std::vector<std::string> tensors_of(const graph::Node& node) const;
  graph::Expr rows() const { return graph::Expr::symbol(given_.batch); }

  const graph::Graph& before_;
  const InnerBroadcast given_;
  graph::Graph graph_;
  std::map<std::string, std::vector<graph::Expr>> substituted_;  // sizes of the original, users' symbols as the batch's
  std::map<std::string, std::string> made_;                      // value of the original -> lifted value, where renamed
  std::map<std::string, Batch> batches_;                         // of lifted values
  std::map<std::string, std::string> stacks_;
  std::map<std::string, std::string> viewed_;       // reshaped value -> what it is a reshape of
  std::map<std::string, std::string> size_values_;  // srepr -> symbolic integer
  std::set<std::string> index_values_;              // the index, and what is the same numbers
  FreshNames names_;
};

}  // namespace ikbo::transform
