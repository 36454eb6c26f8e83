#include "runtime/ids.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tests/runtime/graph_builder.h"

namespace ikbo::runtime {
namespace {

using graph::DType;
using graph::Expr;
using testing::GraphBuilder;
using testing::integer;
using testing::tensor;

const Expr kBatch = Expr::symbol("s0");

void embed(GraphBuilder& g, const std::string& table, const std::string& ids) {
  g.node("torch.ops.aten.embedding.default", {{"weight", tensor(table)}, {"indices", tensor(ids)}}, DType::kFloat32,
         {kBatch, 2});
}

std::string cast(GraphBuilder& g, const std::string& value, std::vector<Expr> sizes) {
  return g.node("torch.ops.aten._to_copy.default", {{"self", tensor(value)}, {"dtype", graph::DTypeArg{DType::kInt64}}},
                DType::kInt64, std::move(sizes));
}

TEST(IdRanges, PackedColumnsThroughSliceSelectAndCast) {
  GraphBuilder g;
  g.weight("t", at::zeros({7, 2}));
  g.weight("u", at::zeros({5, 2}));
  g.input("X", DType::kFloat32, {kBatch, 4});
  const std::string slice =
      g.node("torch.ops.aten.slice.Tensor",
             {{"self", tensor("X")}, {"dim", integer(1)}, {"start", integer(2)}, {"end", integer(4)}}, DType::kFloat32,
             {kBatch, 2});
  embed(g, "t", cast(g, slice, {kBatch, 2}));
  const std::string select =
      g.node("torch.ops.aten.select.int", {{"self", tensor("X")}, {"dim", integer(1)}, {"index", integer(-4)}},
             DType::kFloat32, {kBatch});
  embed(g, "u", cast(g, select, {kBatch}));
  const auto ranges = find_id_ranges(g.finish({"X"}));
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[0].value, "X");
  EXPECT_EQ(ranges[0].columns, (std::vector<DimRange>{{1, 2, 4}}));
  EXPECT_EQ(ranges[0].max, 6);
  EXPECT_EQ(ranges[1].columns, (std::vector<DimRange>{{1, 0, 1}}));
  EXPECT_EQ(ranges[1].max, 4);
}

TEST(IdRanges, HistoryAndTargetConcatenatedBeforeOneLookup) {
  GraphBuilder g;
  g.weight("t", at::zeros({7, 2}));
  g.input("target", DType::kInt64, {kBatch});
  g.input("history", DType::kInt64, {kBatch, 5});
  const std::string column = g.node("torch.ops.aten.unsqueeze.default",
                                    {{"self", tensor("target")}, {"dim", integer(1)}}, DType::kInt64, {kBatch, 1});
  const std::string all = g.node("torch.ops.aten.cat.default",
                                 {{"tensors", graph::TensorListArg{{"history", column}}}, {"dim", integer(-1)}},
                                 DType::kInt64, {kBatch, 6});
  embed(g, "t", all);
  const auto ranges = find_id_ranges(g.finish({"target"}));
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[0].value, "history");
  EXPECT_EQ(ranges[1].value, "target");
  for (const IdRange& range : ranges) EXPECT_TRUE(range.columns.empty() && range.min == 0 && range.max == 6);
}

TEST(IdRanges, ShiftedIdsAndNegativeIndices) {
  GraphBuilder g;
  g.weight("t", at::zeros({7, 2}));
  g.input("a", DType::kInt64, {kBatch});
  g.input("b", DType::kInt64, {kBatch});
  embed(g, "t",
        g.node("torch.ops.aten.add.Tensor", {{"self", tensor("a")}, {"other", integer(2)}}, DType::kInt64, {kBatch}));
  g.node("torch.ops.aten.index.Tensor", {{"self", tensor("t")}, {"indices", graph::OptionalTensorListArg{{"b"}}}},
         DType::kFloat32, {kBatch, 2});
  const auto ranges = find_id_ranges(g.finish({"a"}));
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[0].min, -2);
  EXPECT_EQ(ranges[0].max, 4);
  EXPECT_EQ(ranges[1].min, -7);
  EXPECT_EQ(ranges[1].max, 6);
}

TEST(IdRanges, ComputedIndicesSayNothing) {
  GraphBuilder g;
  g.weight("t", at::zeros({7, 2}));
  g.input("a", DType::kInt64, {kBatch});
  embed(g, "t",
        g.node("torch.ops.aten.remainder.Scalar", {{"self", tensor("a")}, {"other", integer(7)}}, DType::kInt64,
               {kBatch}));
  EXPECT_TRUE(find_id_ranges(g.finish({"a"})).empty());
}

TEST(BadIds, PositionAndValue) {
  const IdRange range{"X", {{1, 1, 3}}, 0, 4, "t"};
  EXPECT_FALSE(find_bad_id(at::tensor({9, 1, 4, 9, 0, 0}, at::kLong).view({2, 3}), range));
  auto bad = find_bad_id(at::tensor({9, 1, 4, 9, 0, 5}, at::kLong).view({2, 3}), range);
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->position, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(bad->value, 5);
  // A packed matrix of floats: cut towards zero, NaN is no id.
  EXPECT_FALSE(find_bad_id(at::tensor({9.0, 4.5, 0.0}, at::kDouble).view({1, 3}), range));
  EXPECT_TRUE(find_bad_id(at::tensor({0.0, std::nan(""), 0.0}, at::kDouble).view({1, 3}), range));
}

// Fields that share one table: each begins at its own row.
TEST(IdRanges, FieldsOffsetByAConstantBeforeTheLookup) {
  GraphBuilder g;
  g.weight("t", at::zeros({12, 2}));
  g.weight("starts", at::tensor({std::int64_t{0}, std::int64_t{7}, std::int64_t{9}}));
  g.input("a", DType::kInt64, {kBatch, 2});
  g.input("b", DType::kInt64, {kBatch, 1});
  const std::string fields =
      g.node("torch.ops.aten.cat.default", {{"tensors", graph::TensorListArg{{"a", "b"}}}, {"dim", integer(1)}},
             DType::kInt64, {kBatch, 3});
  const std::string copy = g.node("torch.ops.aten.clone.default", {{"self", tensor("starts")}}, DType::kInt64, {3});
  const std::string row =
      g.node("torch.ops.aten.unsqueeze.default", {{"self", tensor(copy)}, {"dim", integer(0)}}, DType::kInt64, {1, 3});
  embed(g, "t",
        g.node("torch.ops.aten.add.Tensor", {{"self", tensor(fields)}, {"other", tensor(row)}}, DType::kInt64,
               {kBatch, 3}));
  const auto ranges = find_id_ranges(g.finish({"a"}));
  ASSERT_EQ(ranges.size(), 3U);
  const std::int64_t starts[] = {0, 7, 9};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(ranges[i].value, i < 2 ? "a" : "b");
    EXPECT_EQ(ranges[i].columns, (std::vector<DimRange>{{1, i < 2 ? static_cast<std::int64_t>(i) : 0,
                                                         i < 2 ? static_cast<std::int64_t>(i) + 1 : 1}}));
    EXPECT_EQ(ranges[i].min, -starts[i]);
    EXPECT_EQ(ranges[i].max, 11 - starts[i]);
  }
}

}  // namespace
}  // namespace ikbo::runtime
