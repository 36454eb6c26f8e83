#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "transform/builder.h"
#include "transform/jagged.h"
#include "transform/rules.h"
#include "transform/transform.h"

namespace ikbo::transform {

/// Where a value of the original lives in the new program. The invariant, for every value v of the original:
///   kShared     v is the same tensor in both;
///   kUniform    v's rows along its batch are all equal: it can be made at either batch, and is when needed;
///   kUser       the new value u has one row a user, and v == u[candidate_to_user] along v's batch axis;
///   kCandidate  v is the same tensor in both (batch axis, if any, at B_cand);
///   kJagged     v is made of request-only bags of many lengths: values, whose new tensor has one bag a user and v each
///               candidate's copy of it one after the other (the batch given is the values', of their own number), or
///               their offsets (no batch). Nothing copies them: only bags and what is done entry by entry are
///               understood.
/// Each rewrite is checked against this alone, so that it is right whatever made its operands.
enum class Level { kShared, kUniform, kUser, kCandidate, kJagged };

/// One summand of a piece: a tensor of the new program at one of the batches. `sizes` are those of the original (batch
/// in the original's symbol), with 1 where the tensor is broadcast along a dimension.
struct Term {
  Where where = Where::kCandidate;
  std::string value;
  std::vector<graph::Expr> sizes;
  int sign = 1;
};

/// A stretch of a concatenation: the sum of its terms.
struct Piece {
  std::vector<Term> terms;
  graph::Expr extent;
};

/// What a value at the candidate batch consists of, so that a consumer that knows how can take the parts instead of the
/// whole: pieces along `dim`, each a sum of tensors at their own batches. The whole is only made if somebody needs it.
///
/// `shape` is the shape that the terms' sizes refer to. It is the value's own, or what it was before its leading
/// dimensions were flattened into rows: (B, L, K) for a value of (B * L, K), so that a term (B, 1, K) stays one.
struct Parts {
  int dim = 0;
  std::vector<graph::Expr> shape;
  std::vector<Piece> pieces;
  /// The whole is put together from the terms; else the original's operator makes it from its own operands.
  bool join = false;
};

struct Value {
  Level level = Level::kShared;
  std::optional<Batch> batch;         // kUser, kUniform: always; kCandidate: where the sizes show it
  std::string at_user;                // name in the new program at the user batch; empty until made
  std::string at_candidate;           // at the candidate batch, or shared; empty until made
  const graph::Node* node = nullptr;  // of the original; nullptr for inputs
  std::optional<Parts> parts;
};

class Rewriter {
 public:
  Rewriter(const graph::Archive& archive, const graph::Graph& original, Mode mode, Builder& builder, Report& report,
           std::string index);

  void bind_input(const std::string& name, Value value);
  /// Request-only bags of many lengths.
  void bind_bags(const JaggedBags& bags);
  /// Walks the original's nodes in order.
  void run();
  /// The new value that equals the original's output.
  std::string output(const std::string& name);
  bool depends_on_candidates(const std::string& name) const;

 private:
  // rewriter.cc: levels and placement
  void visit(const graph::Node& node);
  void visit_assertion(const graph::Node& node);
  bool try_rows(const graph::Node& node, std::string& why);
  void place_at_candidates(const graph::Node& node, const std::string& why);
  bool sizes_depend_on_batch(const graph::Node& node) const;
  bool only_sizes_depend_on_batch(const graph::Node& node) const;
  std::optional<Batch> batch_shown_by_sizes(const std::string& name) const;
  bool is_tensor(const std::string& name) const { return original_.tensors.contains(name); }

  // jagged.cc: bags of many lengths
  bool concerns_bags(const graph::Node& node) const;
  void visit_bags(const graph::Node& node);
  bool try_bag(const graph::Node& node);
  bool try_bag_offsets(const graph::Node& node);
  bool try_bag_values(const graph::Node& node);
  std::string total_of(const std::string& name) const;

  // materialise.cc: making values at a batch
  std::string at_user(const std::string& name);
  std::string at_candidate(const std::string& name);
  std::string at(const std::string& name, Where where);
  void clone(const graph::Node& node, Where where, graph::Role role);
  graph::Argument translate(const graph::Argument& argument, Where where);
  std::string scalar(const std::string& name);
  std::string broadcast(const std::string& user_value, const Batch& batch, const graph::TensorMeta& original);
  bool is_view_to_repeat(const graph::Node& node) const;

  // parts.cc: concatenations, sums and expansions kept in parts, and what passes through them
  std::optional<Parts> make_parts(const graph::Node& node);
  bool pass_through_parts(const graph::Node& node);
  std::optional<Term> term_of(const std::string& name);
  std::optional<Parts> parts_of(const std::string& name, int dim);
  std::optional<Parts> parts_of_entry(const std::string& name, int dim);
  std::optional<Parts> parts_of_cat(const graph::Node& node);
  std::optional<Parts> parts_of_sum(const graph::Node& node);
  std::optional<Parts> parts_of_expand(const graph::Node& node);
  std::optional<Parts> passed(const graph::Node& node, const RuleInput& input, const std::string& self);
  std::optional<Parts> view_parts(const Parts& parts, const std::vector<graph::Expr>& before,
                                  const std::vector<graph::Expr>& after);
  std::optional<Parts> cut_parts(const Parts& parts, std::int64_t from, std::int64_t to);
  std::string join_parts(const std::string& name, const Parts& parts);
  bool bind_single_piece(const std::string& name, const Parts& parts);
  std::string apply_to_term(const graph::Node& node, const std::string& self, const Term& term,
                            const std::vector<graph::Expr>& sizes);
  std::string reshape_term(const Term& term, const std::vector<graph::Expr>& sizes);
  std::string expand_term(const Term& term, const std::vector<graph::Expr>& sizes);
  static graph::Role role_of(Where where);

  // parts_pass.cc: operators that work on each piece alone
  std::optional<Parts> unit_dimensions(const Parts& parts, const std::vector<graph::Expr>& before,
                                       const std::vector<graph::Expr>& after);
  std::optional<Parts> picked(const Parts& parts, const RuleInput& input);
  bool split_parts(const graph::Node& node, const RuleInput& input, const std::string& self);
  Piece nothing_of(const Parts& parts);
  std::optional<Parts> cut_across(const Parts& parts, int dim, std::int64_t from, std::int64_t to);
  std::optional<Parts> piece_by_piece(const graph::Node& node, const std::string& self);
  std::optional<Parts> reduced(const graph::Node& node, const RuleInput& input, const std::string& self);
  std::optional<Parts> aligned(const graph::Node& node);
  void merge_neighbours(Parts& parts);
  std::string apply_to_pieces(const graph::Node& node, const std::map<std::string, std::string>& operands, Where where,
                              const std::vector<graph::Expr>& sizes);
  std::string at_candidate(const Term& term, const graph::TensorMeta& original, const Batch& batch);

  // products.cc: products with a weight that all rows share
  struct SharedWeight {
    std::string key;     // of what is made of it: the value in the original, and how it is turned
    std::string target;  // the parameter's name in the state dict
    at::Tensor contents;
  };
  struct Product {  // out[..., m, ...] = sum over k of weight[m, k] input[..., k, ...], plus bias[m]
    std::string input;
    int axis = 0;         // of the input; m stands in its place
    SharedWeight weight;  // contents are (M, K)
    std::string bias;     // empty: none
    bool moved = false;   // m stands last instead
  };
  const graph::Weight* weight_of(const std::string& name) const;
  std::optional<SharedWeight> shared_weight(const std::string& name) const;
  std::optional<Product> product_of(const graph::Node& node) const;
  std::optional<Product> product_with(const std::string& input, int axis, const std::string& weight,
                                      int contracted) const;
  std::optional<Product> product_of_convolution(const RuleInput& in) const;
  std::optional<Product> product_of_einsum(const RuleInput& in) const;
  bool lower_product(const graph::Node& node);

  // linear.cc: concat + linear -> ikbo::linear
  struct WeightColumns {
    std::int64_t from = 0;
    std::int64_t to = 0;
    int sign = 1;
    bool operator<(const WeightColumns& o) const { return std::tie(from, to, sign) < std::tie(o.from, o.to, o.sign); }
  };
  bool lower_linear(const graph::Node& node, const Product& product);
  bool is_whole_anyway(const std::string& name) const;
  static at::Tensor columns_of(const at::Tensor& weight, const std::vector<std::vector<WeightColumns>>& blocks);
  std::string weight_columns(const SharedWeight& weight, const std::vector<std::vector<WeightColumns>>& blocks);
  std::string row_index(Where where, bool repeated, const graph::Expr& inner);

  // compression.cc: stack of embeddings + shared weight -> ikbo::linear_compression
  bool lower_compression(const graph::Node& node, const Product& product);
  bool is_transposed_stack(const std::string& name) const;
  std::string ones_row(const std::string& like, const graph::Expr& width);

  // attention.cc: attention over a request-only history -> ikbo::target_attention
  bool lower_attention(const graph::Node& node);
  struct Attention {
    std::string query;  // (B, H, S, D) or (B * H, S, D), likewise key and value
    std::string key;
    std::string value;
    std::string mask;             // empty: none
    std::optional<double> scale;  // 1 / sqrt(D) where absent
    bool key_transposed = false;  // (B, H, D, L)
    bool grouped = false;         // fewer heads of keys than of queries
  };
  std::optional<Attention> attention_of(const graph::Node& node) const;
  std::optional<Attention> written_out_attention(const graph::Node& node) const;
  std::optional<std::string> rows_of_heads(const std::string& name, Where where, bool transposed);

  // attention_mask.cc: masks over a user's keys
  struct KeyMask {
    std::string value;     // bool, one entry a user and key
    bool negated = false;  // true: not attended
    bool prefix = false;   // the attended keys are the first ones
  };
  std::optional<KeyMask> key_mask(const std::string& mask, const graph::Expr& length) const;
  std::optional<KeyMask> added_to_logits(const RuleInput& in) const;
  std::optional<double> filled_with(const std::string& name) const;
  bool is_positions(const std::string& name, const graph::Expr& length) const;
  std::optional<bool> is_prefix(const std::string& name, const graph::Expr& length) const;
  std::string apply_key_mask(const KeyMask& mask, const graph::Expr& length, std::string& k, std::string& v);

  const graph::Archive& archive_;
  const graph::Graph& original_;
  const Mode mode_;
  Builder& builder_;
  Report& report_;
  const std::string index_;  // candidate_to_user in the new program
  std::map<std::string, Value> values_;
  std::map<std::string, const graph::Node*> scalar_nodes_;  // symbolic scalars that no input shows
  std::map<std::string, std::string> scalars_;
  std::map<std::string, std::string> parameter_targets_;  // graph value -> state-dict name
  std::map<std::string, std::string> row_indices_;
  std::map<std::string, std::string> weights_made_;
  std::map<std::string, std::vector<const graph::Node*>> readers_;  // of the original's values
  std::set<std::string> candidate_dependent_;
  std::set<std::string> totals_;                              // symbols of the numbers of values in request-only bags
  std::map<std::string, std::set<std::string>> bag_offsets_;  // offsets of such bags -> the symbols of their values
  // What is being placed, for the report's "why".
  const graph::Node* consumer_ = nullptr;
  std::string reason_;
};

}  // namespace ikbo::transform
