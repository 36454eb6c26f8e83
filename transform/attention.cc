// Attention of candidates over keys and values that are request-only becomes ikbo::target_attention: keys and values
// stay at the user batch, and a mask over keys becomes each user's number of keys.
#include <algorithm>
#include <cmath>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;

std::optional<Rewriter::Attention> Rewriter::attention_of(const Node& node) const {
  const std::string op = aten_name(node.target);
  if (one_of(op, {"matmul", "bmm"})) return written_out_attention(node);
  if (op != "scaled_dot_product_attention" || is_random(node)) return std::nullopt;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, node, builder_.candidate_symbol(), none);
  const std::string* query = in.tensor("query");
  const std::string* key = in.tensor("key");
  const std::string* value = in.tensor("value");
  if (query == nullptr || key == nullptr || value == nullptr || in.boolean("is_causal") == true) return std::nullopt;
  Attention attention{*query, *key, *value, {}, in.number("scale"), false, in.boolean("enable_gqa") == true};
  if (const std::string* mask = in.tensor("attn_mask")) attention.mask = *mask;
  return attention;
}

// softmax(q k^T * scale) v, as operators of their own. With a mask it is left alone: what a user without keys gets then
// (NaN, a mean of padding) is not what the operator gives.
std::optional<Rewriter::Attention> Rewriter::written_out_attention(const Node& node) const {
  const std::map<std::string, Batch> none;
  const auto input = [&](const Node& n) { return RuleInput(original_, n, builder_.candidate_symbol(), none); };
  // The operator that makes a value which nothing else reads.
  const auto maker = [&](const std::string& name) -> const Node* {
    int uses = 0;
    for (const Node& n : original_.nodes) {
      const auto names = graph::input_names(n);
      uses += static_cast<int>(std::count(names.begin(), names.end(), name));
    }
    for (const Argument& out : original_.outputs) uses += graph::value_names(out) == std::vector{name} ? 1 : 0;
    const auto it = values_.find(name);
    return uses == 1 && it != values_.end() ? it->second.node : nullptr;
  };
  const auto products = input(node).operands();
  if (products.size() != 2) return std::nullopt;
  const Node* at = maker(products[0]);
  while (at != nullptr && !is_random(*at) &&
         (keeps_values(aten_name(at->target)) || aten_name(at->target) == "dropout")) {
    at = maker(input(*at).operands()[0]);
  }
  if (at == nullptr || !one_of(aten_name(at->target), {"softmax", "_softmax"})) return std::nullopt;
  const RuleInput softmax = input(*at);
  const std::string logits = softmax.operands()[0];
  const auto type = [&](const std::string& name) { return original_.tensors.at(name).dtype; };
  if (softmax.dim("dim", softmax.rank(logits)) != softmax.rank(logits) - 1) return std::nullopt;
  if (type(softmax.results()[0]) != type(logits)) return std::nullopt;

  double scale = 1;
  at = maker(logits);
  while (at != nullptr && one_of(aten_name(at->target), {"mul", "div"})) {
    const RuleInput factor = input(*at);
    const auto number = factor.number("other");
    if (factor.operands().size() != 1 || !number || at->find("rounding_mode") != nullptr) return std::nullopt;
    scale = aten_name(at->target) == "mul" ? scale * *number : scale / *number;
    at = maker(factor.operands()[0]);
  }
  if (at == nullptr || !one_of(aten_name(at->target), {"matmul", "bmm"}) || !std::isfinite(scale)) return std::nullopt;
  const auto operands = input(*at).operands();
  if (operands.size() != 2) return std::nullopt;
  return Attention{operands[0], operands[1], products[1], {}, scale, /*key_transposed=*/true, /*grouped=*/false};
}

// (B, H, S, D) or (B * H, S, D) as (B, S, H, D); nothing where the batch stands elsewhere.
std::optional<std::string> Rewriter::rows_of_heads(const std::string& name, Where where, bool transposed) {
  std::vector<Expr> sizes = original_.tensors.at(name).sizes;
  const auto batch = batch_shown_by_sizes(name);
  if (!batch || batch->axis != 0) return std::nullopt;
  if (sizes.size() == 4 && !batch->inner.is_integer(1)) return std::nullopt;
  std::string value = at(name, where);
  if (sizes.size() == 3) {
    sizes[0] = Expr::symbol(builder_.candidate_symbol());
    sizes.insert(sizes.begin() + 1, batch->inner);
    std::vector<Expr> placed;
    for (const Expr& e : sizes) placed.push_back(builder_.at(e, where));
    value = builder_.reshape(value, placed, role_of(where));
  }
  if (sizes.size() != 4) return std::nullopt;
  if (transposed) value = builder_.transpose(value, 2, 3, role_of(where));
  return builder_.transpose(value, 1, 2, role_of(where));
}

bool Rewriter::lower_attention(const Node& node) {
  const auto attention = attention_of(node);
  if (!attention) return false;
  const auto level = [&](const std::string& name) { return values_.at(name).level; };
  const auto at_users = [&](const std::string& name) {
    return level(name) == Level::kUser || level(name) == Level::kUniform;
  };
  if (level(attention->query) != Level::kCandidate || !at_users(attention->key) || !at_users(attention->value)) {
    return false;
  }
  if (!attention->mask.empty() && !at_users(attention->mask)) return false;
  if (level(attention->key) == Level::kUniform && level(attention->value) == Level::kUniform) return false;

  // The operator wants q, k and v of one width, and as many heads of k as of v.
  const std::string result = graph::output_names(node)[0];
  const auto meta_of = [&](const std::string& name) -> const graph::TensorMeta& { return original_.tensors.at(name); };
  const auto& query = meta_of(attention->query);
  const auto& value = meta_of(attention->value);
  auto key_sizes = meta_of(attention->key).sizes;
  const std::size_t rank = query.sizes.size();
  if (rank < 3 || rank > 4 || key_sizes.size() != rank || value.sizes.size() != rank) return false;
  if (attention->key_transposed) std::swap(key_sizes[rank - 1], key_sizes[rank - 2]);
  if (!(key_sizes == value.sizes) || !(query.sizes.back() == value.sizes.back())) return false;
  if (query.dtype != value.dtype || query.dtype != meta_of(attention->key).dtype) return false;
  if (!graph::is_floating(query.dtype) || query.dtype != meta_of(result).dtype) return false;
  const bool same_heads = key_sizes[rank - 3] == query.sizes[rank - 3];
  if (!same_heads && !(rank == 4 && (attention->grouped || key_sizes[1].is_integer(1)))) return false;
  const Expr length = key_sizes[rank - 2];

  std::optional<KeyMask> mask;
  if (!attention->mask.empty()) {
    mask = key_mask(attention->mask, length);
    if (!mask) return false;
  }
  const auto q = rows_of_heads(attention->query, Where::kCandidate, false);
  auto k = rows_of_heads(attention->key, Where::kUser, attention->key_transposed);
  auto v = rows_of_heads(attention->value, Where::kUser, false);
  if (!q || !k || !v) return false;
  Argument lengths = graph::NoneArg{};
  if (mask) lengths = TensorArg{apply_key_mask(*mask, length, *k, *v)};
  Argument scale = graph::NoneArg{};
  if (attention->scale) scale = *attention->scale;

  graph::TensorMeta meta = meta_of(result);
  const std::vector<Expr> wanted = meta.sizes;
  meta.sizes = builder_.meta(*q).sizes;
  meta.strides = graph::contiguous_strides(meta.sizes);
  meta.storage_offset = 0;
  std::string made = builder_.emit("torch.ops.ikbo.target_attention.default",
                                   {{"q", TensorArg{*q}, 1},
                                    {"k", TensorArg{*k}, 1},
                                    {"v", TensorArg{*v}, 1},
                                    {"candidate_to_user", TensorArg{index_}, 1},
                                    {"kv_lengths", lengths, 2},
                                    {"scale", scale, 2}},
                                   "ikbo_target_attention", std::move(meta), Role::kIkbo, &node,
                                   fmt::format("{} over keys and values at the user batch", node.name));
  made = builder_.transpose(made, 1, 2, Role::kCandidate);
  Value placed;
  placed.level = Level::kCandidate;
  placed.batch = batch_shown_by_sizes(result);
  placed.node = &node;
  placed.at_candidate = builder_.reshape(made, wanted, Role::kCandidate);
  values_[result] = std::move(placed);
  return true;
}

}  // namespace ikbo::transform
