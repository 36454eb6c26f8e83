// A product of a shared weight with a stack of embeddings kept in parts becomes ikbo::linear_compression: each part is
// multiplied by its own columns of the weight, at its own batch. Source: linearity, W [E_u; E_c] = W_u E_u + W_c E_c.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;

namespace {

// Rows of a weight begin at multiples of this many elements: what 16-byte loads of 16-bit types need.
constexpr std::int64_t kRowAlignment = 8;

// The same matrix with a padded row stride; K itself stays, so that nothing multiplies zeros.
at::Tensor with_aligned_rows(const at::Tensor& weight) {
  const std::int64_t k = weight.size(1);
  const std::int64_t stride = (k + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  return at::zeros({weight.size(0), stride}, weight.options()).slice(1, 0, k).copy_(weight);
}

}  // namespace

// (B, N, K) that is made by turning a stack (B, K, N): the stack itself is what an operator should read.
bool Rewriter::is_transposed_stack(const std::string& name) const {
  const auto it = values_.find(name);
  if (it == values_.end() || it->second.node == nullptr || original_.tensors.at(name).sizes.size() != 3) return false;
  const Node& node = *it->second.node;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, node, builder_.candidate_symbol(), none);
  const std::string op = aten_name(node.target);
  if (op == "clone" || op == "contiguous") return is_transposed_stack(in.operands()[0]);
  if (op == "permute") {
    auto dims = in.integers("dims");
    if (dims) std::transform(dims->begin(), dims->end(), dims->begin(), [](std::int64_t d) { return (d + 3) % 3; });
    return dims == std::vector<std::int64_t>{0, 2, 1};
  }
  if (op != "transpose") return false;
  const auto d0 = in.dim("dim0", 3);
  const auto d1 = in.dim("dim1", 3);
  return d0 && d1 && *d0 + *d1 == 3 && *d0 != 0 && *d1 != 0;
}

bool Rewriter::lower_compression(const Node& node, const Product& product) {
  const Parts parts = *values_.at(product.input).parts;
  const auto& sizes = original_.tensors.at(product.input).sizes;
  const Expr batch = Expr::symbol(builder_.candidate_symbol());
  if (sizes.size() != 3 || !(parts.shape == sizes) || parts.dim != product.axis || !(sizes[0] == batch)) return false;
  const auto k = static_cast<std::size_t>(product.axis);
  const std::size_t n = 3 - k;
  std::optional<at::Tensor> bias;
  if (!product.bias.empty()) {
    const auto shared = shared_weight(product.bias);
    if (!shared || shared->contents.dim() != 1) return false;
    bias = shared->contents;
  }

  // Sort the terms by the batch that they are at.
  struct Block {
    Term term;
    std::vector<WeightColumns> columns;
  };
  std::map<Where, std::vector<Block>> groups;
  std::int64_t column = 0;
  for (const Piece& piece : parts.pieces) {
    const auto extent = piece.extent.as_integer();
    if (!extent) return false;
    for (Term term : piece.terms) {
      std::vector<Expr> full = sizes;
      full[k] = piece.extent;
      term.value = expand_term(term, full);
      term.sizes = full;
      auto& group = groups[term.where];
      const auto same = std::find_if(group.begin(), group.end(), [&](const Block& b) {
        return b.term.value == term.value && b.term.sizes == term.sizes;
      });
      auto& columns = same != group.end() ? same->columns : group.emplace_back(Block{term, {}}).columns;
      columns.push_back({column, column + *extent, term.sign});
    }
    column += *extent;
  }
  if (!groups.contains(Where::kUser) || !groups.contains(Where::kCandidate)) return false;
  if (product.weight.contents.size(1) != column) return false;

  // The stack of one side as (B, K, N), and its columns of the weight, both with aligned rows. The bias is one more row
  // of the user's stack, of ones, so that the sum is still rounded once.
  const auto gather = [&](Where where) {
    std::vector<std::string> values;
    std::vector<std::vector<WeightColumns>> columns;
    std::string key = product.weight.key + (where == Where::kUser ? ";user" : ";candidate");
    for (Block& block : groups.at(where)) {
      const std::string& value = block.term.value;
      values.push_back(k == 1 ? value : builder_.transpose(value, 1, 2, role_of(where)));
      std::sort(block.columns.begin(), block.columns.end());
      columns.push_back(block.columns);
      key += ";";
      for (const WeightColumns& c : block.columns) key += fmt::format(" {}{}:{}", c.sign < 0 ? "-" : "+", c.from, c.to);
    }
    values = builder_.taken_apart(values, 1, role_of(where));
    at::Tensor weight = columns_of(product.weight.contents, columns);
    if (where == Where::kUser && bias) {
      values.push_back(ones_row(values[0], builder_.at(sizes[n], where)));
      weight = at::cat({weight, bias->unsqueeze(1)}, 1);
      key += ";" + product.bias;
    }
    auto& made = weights_made_[key];
    if (made.empty()) {
      const std::string wanted = fmt::format("{}_ikbo_{}", product.weight.target, weights_made_.size() - 1);
      made = builder_.parameter(wanted, with_aligned_rows(weight), /*keep_strides=*/true);
    }
    return std::pair(builder_.aligned_cat(values, 1, role_of(where)), made);
  };
  const auto [e_cand, w_cand] = gather(Where::kCandidate);
  const auto [e_user, w_user] = gather(Where::kUser);

  const std::string result = graph::output_names(node)[0];
  graph::TensorMeta meta = original_.tensors.at(result);
  meta.sizes = {batch, product.weight.contents.size(0), sizes[n]};
  meta.strides = graph::contiguous_strides(meta.sizes);
  std::string made = builder_.emit("torch.ops.ikbo.linear_compression.default",
                                   {{"w_cand", TensorArg{w_cand}, 1},
                                    {"e_cand", TensorArg{e_cand}, 1},
                                    {"w_bcast", graph::TensorListArg{{w_user}}, 1},
                                    {"e_bcast", graph::TensorListArg{{e_user}}, 1},
                                    {"index", graph::TensorListArg{{index_}}, 1}},
                                   "ikbo_linear_compression", std::move(meta), Role::kIkbo, &node,
                                   fmt::format("{} on stacks at their own batches", node.name));
  const bool m_last = k == 2 || product.moved;
  if (m_last) made = builder_.transpose(made, 1, 2, Role::kCandidate);
  Value value;
  value.level = Level::kCandidate;
  value.batch = batch_shown_by_sizes(result);
  value.node = &node;
  value.at_candidate = made;
  values_[result] = std::move(value);
  return true;
}

// (B, 1, N) of ones, with the batch and the type of `like`.
std::string Rewriter::ones_row(const std::string& like, const Expr& width) {
  graph::TensorMeta meta = builder_.meta(like);
  meta.sizes = {meta.sizes[0], 1, width};
  meta.strides = graph::contiguous_strides(meta.sizes);
  meta.storage_offset = 0;
  Argument size = builder_.sizes(meta.sizes);
  return builder_.emit("torch.ops.aten.new_ones.default", {{"self", TensorArg{like}, 1}, {"size", std::move(size), 1}},
                       "ones_row", std::move(meta), Role::kRequestOnly);
}

}  // namespace ikbo::transform
