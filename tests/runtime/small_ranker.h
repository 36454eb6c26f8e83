#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>

#include "runtime/model.h"
#include "tests/runtime/graph_builder.h"

namespace ikbo::testing {

/// score = sigmoid(sum(user_table[user_id] * item_table[item], 1)) + price, as exported (one batch) and as transformed
/// (two batches), with ids and a float input; A `broken` one is
/// off by a factor of 1.00001; with `dead_user` the user moves nothing.
struct SmallRanker {
  graph::Archive original;
  graph::Archive transformed;
};

inline constexpr std::int64_t kUsers = 6;
inline constexpr std::int64_t kItems = 9;

inline std::string score_of(GraphBuilder& g, const std::string& user, const std::string& item, const Expr& batch) {
  const std::string product = g.node("torch.ops.aten.mul.Tensor", {{"self", tensor(user)}, {"other", tensor(item)}},
                                     DType::kFloat32, {batch, 8});
  const std::string sum =
      g.node("torch.ops.aten.sum.dim_IntList", {{"self", tensor(product)}, {"dim", std::vector<std::int64_t>{1}}},
             DType::kFloat32, {batch});
  const std::string sigmoid =
      g.node("torch.ops.aten.sigmoid.default", {{"self", tensor(sum)}}, DType::kFloat32, {batch});
  return g.node("torch.ops.aten.add.Tensor", {{"self", tensor(sigmoid)}, {"other", tensor("price")}}, DType::kFloat32,
                {batch});
}

inline std::string lookup(GraphBuilder& g, const std::string& table, const std::string& ids, const Expr& batch) {
  return g.node("torch.ops.aten.embedding.default", {{"weight", tensor(table)}, {"indices", tensor(ids)}},
                DType::kFloat32, {batch, 8});
}

inline SmallRanker small_ranker(bool broken = false, bool dead_user = false) {
  const at::Tensor user_table = at::randn({kUsers, 8}) * (dead_user ? 0 : 1);
  const at::Tensor item_table = at::randn({kItems, 8});
  SmallRanker ranker;
  {
    const Expr batch = Expr::symbol("s7");
    GraphBuilder g;
    g.range("s7", {0, std::nullopt});
    g.weight("user_table", user_table);
    g.weight("item_table", item_table);
    g.input("user_id", DType::kInt64, {batch});
    g.input("item", DType::kInt64, {batch});
    g.input("price", DType::kFloat32, {batch});
    const std::string user = lookup(g, "user_table", "user_id", batch);
    const std::string item = lookup(g, "item_table", "item", batch);
    ranker.original = g.finish({score_of(g, user, item, batch)});
  }
  const Expr b_user = Expr::symbol("su");
  const Expr b_cand = Expr::symbol("sc");
  GraphBuilder g;
  g.range("su", {1, 100}).range("sc", {1, 1000});
  g.weight("user_table", user_table);
  g.weight("item_table", item_table);
  g.input("user_id", DType::kInt64, {b_user});
  g.input("item", DType::kInt64, {b_cand});
  g.input("price", DType::kFloat32, {b_cand});
  g.input("candidate_to_user", DType::kInt32, {b_cand});
  const std::string user = lookup(g, "user_table", "user_id", b_user);
  const std::string rows = g.node("torch.ops.aten.index_select.default",
                                  {{"self", tensor(user)}, {"dim", integer(0)}, {"index", tensor("candidate_to_user")}},
                                  DType::kFloat32, {b_cand, 8});
  const std::string item = lookup(g, "item_table", "item", b_cand);
  std::string sum = score_of(g, rows, item, b_cand);
  if (broken) {
    sum = g.node("torch.ops.aten.mul.Tensor", {{"self", tensor(sum)}, {"other", 1.00001}}, DType::kFloat32, {b_cand});
  }
  ranker.transformed = g.finish({sum});
  graph::Specification spec;
  spec.mode = "split";
  spec.user_symbol = "su";
  spec.candidate_symbol = "sc";
  spec.user_range = {1, 100};
  spec.candidate_range = {1, 1000};
  spec.inputs = {{"user_id", "user_id", "user_id", graph::Side::kRequestOnly},
                 {"item", "item", "item", graph::Side::kCandidate},
                 {"price", "price", "price", graph::Side::kCandidate},
                 {"candidate_to_user", "candidate_to_user", "candidate_to_user", graph::Side::kIndex}};
  ranker.transformed.extra_files[graph::Specification::kFile] = graph::specification_to_json(spec).dump();
  return ranker;
}

}  // namespace ikbo::testing
