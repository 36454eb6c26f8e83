#include "cli/tune_points.h"

#include <gtest/gtest.h>

#include "tests/runtime/graph_builder.h"

namespace ikbo::cli {
namespace {

using graph::DType;
using graph::Expr;
using graph::MeasuredDevice;
using testing::GraphBuilder;
using testing::message_of;

const Expr kUsers = Expr::symbol("su");
const Expr kCandidates = Expr::symbol("sc");

graph::Specification specification(graph::Range users = {1, std::nullopt}, graph::Range candidates = {1, 1000}) {
  graph::Specification spec;
  spec.user_symbol = "su";
  spec.candidate_symbol = "sc";
  spec.user_range = users;
  spec.candidate_range = candidates;
  return spec;
}

/// An operator with broadcast terms of the given rows and K; its operands are only described.
void compression(GraphBuilder& g, DType dtype, const Expr& candidates, const Expr& m, std::int64_t k, const Expr& n,
                 const std::vector<std::pair<Expr, Expr>>& terms) {
  static int number = 0;
  const std::string name = "c" + std::to_string(number++);
  g.describe(name + "w", dtype, {m, k});
  g.describe(name + "e", dtype, {candidates, k, n});
  graph::TensorListArg w;
  graph::TensorListArg e;
  for (const auto& [rows, term_k] : terms) {
    w.names.push_back(name + "w" + std::to_string(w.names.size()));
    e.names.push_back(name + "e" + std::to_string(e.names.size()));
    g.describe(w.names.back(), dtype, {m, term_k});
    g.describe(e.names.back(), dtype, {rows, term_k, n});
  }
  g.node("torch.ops.ikbo.linear_compression.default",
         {{"w_cand", testing::tensor(name + "w")},
          {"e_cand", testing::tensor(name + "e")},
          {"w_bcast", w},
          {"e_bcast", e},
          {"index", graph::TensorListArg{}}},
         dtype, {candidates, m, n});
}

TEST(TunePoints, FollowTheOperatorsOwnBatches) {
  GraphBuilder g;
  compression(g, DType::kFloat16, kCandidates * 2, 8, 24, 64, {{kUsers, 40}, {kUsers * 3, 5}});
  compression(g, DType::kFloat16, kCandidates, 8, 24, 64, {{kUsers, 40}, {kUsers * 3, 5}});  // the same shape
  compression(g, DType::kBFloat16, kCandidates, 8, 0, 65, {});
  const TunePlan plan = plan_tuning(g.finish({}), specification(), {.candidates = {140, 70}, .users = {1}});
  ASSERT_EQ(plan.shapes.size(), 2U);
  EXPECT_TRUE(plan.skipped.empty());
  EXPECT_EQ(plan.points(), 5U);
  const auto& shape = plan.shapes[0];
  EXPECT_EQ(shape.dtype, "float16");
  EXPECT_EQ(shape.k_broadcast, (std::vector<std::int64_t>{40, 5}));
  ASSERT_EQ(shape.points.size(), 3U);  // at 140 candidates of its own, both operators are at the same point
  const std::int64_t candidates[] = {280, 140, 70};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(shape.points[i].candidates, candidates[i]);
    EXPECT_EQ(shape.points[i].rows, (std::vector<std::int64_t>{1, 3}));
  }
  EXPECT_EQ(plan.shapes[1].k_candidate, 0);
}

TEST(TunePoints, WhatCannotBeMeasuredIsLeftOutWithTheReason) {
  GraphBuilder g;
  compression(g, DType::kFloat16, kCandidates, 8, 24, 64, {{kUsers, 40}});
  compression(g, DType::kFloat16, kCandidates, 8, 24, Expr::symbol("sn"), {{kUsers, 40}});
  compression(g, DType::kFloat16, kCandidates, 8, 24, 64, {{Expr::symbol("vendors"), 41}});
  compression(g, DType::kFloat32, kCandidates, 8, 24, 64, {{kUsers, 40}});
  compression(g, DType::kFloat16, kCandidates, 8, 24, 64, {5, {kUsers, 40}});
  const TunePlan plan = plan_tuning(g.finish({}), specification(), {});
  EXPECT_EQ(plan.shapes.size(), 1U);
  ASSERT_EQ(plan.skipped.size(), 4U);
  EXPECT_EQ(plan.skipped[0], "n1: N is sn, which the model does not fix");
  EXPECT_EQ(plan.skipped[1], "n2: its batch vendors does not follow from the numbers of users and candidates");
  EXPECT_EQ(plan.skipped[2], "n3: it is in float32, and only bfloat16 and float16 have configurations to choose among");
  EXPECT_EQ(plan.skipped[3], "n4: it has 5 broadcast terms, the kernel at most 4");
}

std::vector<std::pair<std::int64_t, std::int64_t>> usual(graph::Range users, graph::Range candidates) {
  GraphBuilder g;
  compression(g, DType::kFloat16, kCandidates, 8, 24, 64, {{kUsers, 40}});
  std::vector<std::pair<std::int64_t, std::int64_t>> points;
  const TunePlan plan = plan_tuning(g.finish({}), specification(users, candidates), {});
  for (const auto& point : plan.shapes[0].points) points.emplace_back(point.candidates, point.rows[0]);
  return points;
}

TEST(TunePoints, TheUsualOnesAreThoseThatTheArchiveAllows) {
  using Points = std::vector<std::pair<std::int64_t, std::int64_t>>;
  const graph::Range any;
  EXPECT_EQ(usual(any, any), (Points{{16, 1}, {64, 1}, {256, 4}, {1024, 15}, {4096, 59}}));
  EXPECT_EQ(usual({2, 3}, {20, 256}), (Points{{64, 2}, {256, 3}}));
  EXPECT_EQ(usual(any, {0, 5}), (Points{{5, 1}}));
  EXPECT_EQ(usual(any, {9000, std::nullopt}), (Points{{9000, 129}}));
}

TEST(TunePoints, AnotherDevicesMeasurementsStay) {
  graph::Specification spec;
  const auto measured = [](const std::string& device, int multiprocessors, std::int64_t m) {
    return MeasuredDevice{device, multiprocessors, {{"float16", m, 64, 24, {}, {}}}};
  };
  store(spec, measured("A", 132, 1));
  store(spec, measured("A", 114, 2));
  store(spec, measured("B", 132, 3));
  store(spec, measured("A", 132, 4));
  ASSERT_EQ(spec.configurations.size(), 3U);
  EXPECT_EQ(spec.configurations[0].linear_compression[0].m, 4);
  EXPECT_EQ(spec.configurations[0].linear_compression.size(), 1U);
  EXPECT_EQ(spec.configurations[1].linear_compression[0].m, 2);
  EXPECT_EQ(spec.configurations[2].linear_compression[0].m, 3);
}

}  // namespace
}  // namespace ikbo::cli
