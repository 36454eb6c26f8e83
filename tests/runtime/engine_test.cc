#include "runtime/engine.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/overhead.h"
#include "tests/runtime/graph_builder.h"

namespace ikbo::runtime {
namespace {

using graph::DType;
using graph::Expr;
using testing::GraphBuilder;
using testing::integer;
using testing::message_of;
using testing::symbol;
using testing::tensor;

const Expr kBatch = Expr::symbol("s0");

std::vector<at::Tensor> run(const graph::Archive& archive, const std::vector<at::Tensor>& inputs,
                            const EngineOptions& options = {}) {
  return make_eager_engine(archive, options)->run(inputs);
}

// y = relu(linear(x, w, b)), and the number of rows doubled.
graph::Archive small_model(const at::Tensor& w, const at::Tensor& b) {
  GraphBuilder g;
  g.weight("w", w);
  g.weight("b", b);
  g.input("x", DType::kFloat32, {kBatch, 3});
  const std::string rows = g.number("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}});
  const std::string twice = g.number("_operator.mul", {{"a", symbol(rows)}, {"b", integer(2)}});
  const std::string y =
      g.node("torch.ops.aten.linear.default", {{"input", tensor("x")}, {"weight", tensor("w")}, {"bias", tensor("b")}},
             DType::kFloat32, {kBatch, 2});
  const std::string z = g.node("torch.ops.aten.relu.default", {{"self", tensor(y)}}, DType::kFloat32, {kBatch, 2});
  return g.finish({z, twice});
}

TEST(EagerEngine, RunsOperatorsAndSymbolicSizes) {
  const at::Tensor w = at::randn({2, 3});
  const at::Tensor b = at::randn({2});
  const graph::Archive archive = small_model(w, b);
  for (const std::int64_t rows : {0, 1, 5}) {
    const at::Tensor x = at::randn({rows, 3});
    const auto outputs = run(archive, {x});
    ASSERT_EQ(outputs.size(), 2U);
    EXPECT_TRUE(at::allclose(outputs[0], at::relu(x.matmul(w.t()) + b)));
    EXPECT_EQ(outputs[1].item<std::int64_t>(), 2 * rows);
  }
}

TEST(EagerEngine, Float64PromotesEverything) {
  const graph::Archive archive = small_model(at::randn({2, 3}), at::randn({2}));
  EngineOptions options;
  options.float64 = true;
  EXPECT_EQ(run(archive, {at::randn({4, 3})}, options)[0].scalar_type(), at::kDouble);
  // A mean of integers takes the default type, which is float64 then.
  GraphBuilder g;
  g.input("x", DType::kInt64, {kBatch});
  const std::string y = g.node("torch.ops.aten.sigmoid.default", {{"self", tensor("x")}}, DType::kFloat32, {kBatch});
  EXPECT_EQ(run(g.finish({y}), {at::arange(3)}, options)[0].scalar_type(), at::kDouble);
}

TEST(EagerEngine, NumbersWhereTensorsAreExpected) {
  GraphBuilder g;
  g.input("x", DType::kInt32, {kBatch});
  const std::string rows = g.number("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}});
  const std::string a =
      g.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", integer(3)}}, DType::kInt32, {kBatch});
  const std::string b =
      g.node("torch.ops.aten.add.Tensor", {{"self", tensor(a)}, {"other", symbol(rows)}}, DType::kInt32, {kBatch});
  const auto outputs = run(g.finish({b}), {at::arange(4, at::kInt)});
  // As in Python, a plain number does not widen the result.
  EXPECT_EQ(outputs[0].scalar_type(), at::kInt);
  EXPECT_TRUE(at::equal(outputs[0], at::arange(4, at::kInt) * 3 + 4));
}

TEST(EagerEngine, ListsInAndOut) {
  GraphBuilder g;
  g.input("x", DType::kFloat32, {kBatch, 6});
  graph::Node& split =
      g.call("torch.ops.aten.split.Tensor", {{"self", tensor("x")}, {"split_size", integer(2)}, {"dim", integer(1)}});
  split.outputs = {graph::TensorListArg{{"a", "b", "c"}}};
  for (const char* name : {"a", "b", "c"}) g.describe(name, DType::kFloat32, {kBatch, 2});
  const std::string y =
      g.node("torch.ops.aten.cat.default", {{"tensors", graph::TensorListArg{{"c", "a"}}}, {"dim", integer(1)}},
             DType::kFloat32, {kBatch, 4});
  const at::Tensor x = at::randn({3, 6});
  EXPECT_TRUE(at::equal(run(g.finish({y}), {x})[0], at::cat({x.narrow(1, 4, 2), x.narrow(1, 0, 2)}, 1)));
}

TEST(EagerEngine, InPlaceOperatorsChangeNeitherWeightsNorInputs) {
  const at::Tensor w = at::ones({4});
  GraphBuilder g;
  g.weight("w", w);
  g.input("x", DType::kFloat32, {4});
  // Through views: w[1:3] += 1, x.relu_()
  const std::string view = g.node(
      "torch.ops.aten.slice.Tensor",
      {{"self", tensor("w")}, {"dim", integer(0)}, {"start", integer(1)}, {"end", integer(3)}}, DType::kFloat32, {2});
  g.node("torch.ops.aten.add_.Tensor", {{"self", tensor(view)}, {"other", integer(1)}}, DType::kFloat32, {2});
  g.node("torch.ops.aten.relu_.default", {{"self", tensor("x")}}, DType::kFloat32, {4});
  const std::string sum =
      g.node("torch.ops.aten.add.Tensor", {{"self", tensor("w")}, {"other", tensor("x")}}, DType::kFloat32, {4});
  const graph::Archive archive = g.finish({sum});
  const auto engine = make_eager_engine(archive, {});
  const at::Tensor x = at::full({4}, -5.0);
  const at::Tensor expected = at::ones({4});
  expected.narrow(0, 1, 2).add_(1);
  for (int i = 0; i < 2; ++i) {
    const std::vector<at::Tensor> inputs{x};
    EXPECT_TRUE(at::equal(engine->run(inputs)[0], expected)) << "run " << i;
  }
  EXPECT_TRUE(at::equal(x, at::full({4}, -5.0)));
  EXPECT_TRUE(at::equal(graph::weight_tensor(archive.weights.at("w")), w));
}

// The storage of a weight that nothing reads is freed; a later tensor at its address is no weight.
TEST(EagerEngine, UnreadWeightsDoNotTaintLaterTensors) {
  GraphBuilder g;
  for (int i = 0; i < 16; ++i) g.weight("unread" + std::to_string(i), at::ones({4}));
  g.input("x", DType::kFloat32, {kBatch});
  const std::string copy = g.node("torch.ops.aten.clone.default", {{"self", tensor("x")}}, DType::kFloat32, {kBatch});
  g.node("torch.ops.aten.relu_.default", {{"self", tensor(copy)}}, DType::kFloat32, {kBatch});
  const graph::Archive archive = g.finish({copy});
  const auto engine = make_eager_engine(archive, {});
  std::vector<at::Tensor> kept;  // so that every run takes another address
  for (int i = 0; i < 64; ++i) {
    const std::vector<at::Tensor> inputs{at::full({4}, -1.0)};
    kept.push_back(engine->run(inputs)[0]);
    EXPECT_TRUE(at::equal(kept.back(), at::zeros({4})));
  }
}

TEST(EagerEngine, TrainingBatchNormLeavesRunningStatisticsAlone) {
  GraphBuilder g;
  g.weight("mean", at::zeros({2}));
  g.weight("var", at::ones({2}));
  g.input("x", DType::kFloat32, {kBatch, 2});
  const std::string y = g.node("torch.ops.aten.batch_norm.default",
                               {{"input", tensor("x")},
                                {"weight", graph::NoneArg{}},
                                {"bias", graph::NoneArg{}},
                                {"running_mean", tensor("mean")},
                                {"running_var", tensor("var")},
                                {"training", true},
                                {"momentum", 0.1},
                                {"eps", 1e-5},
                                {"cudnn_enabled", true}},
                               DType::kFloat32, {kBatch, 2});
  const graph::Archive archive = g.finish({y});
  run(archive, {at::randn({8, 2}) + 3});
  EXPECT_TRUE(at::equal(graph::weight_tensor(archive.weights.at("mean")), at::zeros({2})));
}

TEST(EagerEngine, WrongInputsAreNamedBeforeAnythingRuns) {
  GraphBuilder g;
  g.range("s0", {std::int64_t{0}, std::int64_t{10}});
  g.input("user", DType::kInt64, {kBatch, 3});
  g.input("item", DType::kFloat32, {kBatch});
  g.input("twice", DType::kFloat32, {Expr(2) * kBatch});
  const std::string y = g.node("torch.ops.aten.relu.default", {{"self", tensor("item")}}, DType::kFloat32, {kBatch});
  const auto engine = make_eager_engine(g.finish({y}), {});
  const at::Tensor user = at::zeros({4, 3}, at::kLong);
  const at::Tensor item = at::zeros({4});
  const at::Tensor twice = at::zeros({8});
  const auto message = [&](std::vector<at::Tensor> inputs) { return message_of([&] { engine->run(inputs); }); };
  EXPECT_EQ(message({user, item, twice}), "");
  struct Case {
    std::vector<at::Tensor> inputs;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {{user, item}, {"3 inputs", "user, item, twice", "2 were given"}},
      {{user.to(at::kInt), item, twice}, {"'user'", "int64 [s0, 3]", "int32 [4, 3]"}},
      {{at::zeros({4}, at::kLong), item, twice}, {"'user'", "int64 [s0, 3]", "int64 [4]"}},
      {{at::zeros({4, 2}, at::kLong), item, twice}, {"'user'", "dimension 1 must be 3"}},
      {{user, at::zeros({5}), twice}, {"'item'", "5", "'user' has 4"}},
      {{user, item, at::zeros({9})}, {"'twice'", "9", "8"}},
      {{user, at::Tensor(), twice}, {"'item' is missing"}},
      {{at::zeros({11, 3}, at::kLong), at::zeros({11}), at::zeros({22})}, {"'user'", "11", "0 to 10"}},
  };
  for (const Case& c : cases) {
    const std::string text = message(c.inputs);
    ASSERT_NE(text, "") << c.parts[0];
    for (const std::string& part : c.parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

TEST(EagerEngine, UnknownOperatorsAreNamedAtLoad) {
  const auto message = [](const std::string& target) {
    GraphBuilder g;
    g.input("x", DType::kFloat32, {kBatch});
    const std::string y = g.node(target, {{"self", tensor("x")}}, DType::kFloat32, {kBatch});
    const graph::Archive archive = g.finish({y});
    return message_of([&] { make_eager_engine(archive, {}); });
  };
  for (const char* target : {"torch.ops.aten.nothing_like_it.default", "torch.ops.mine.op.default", "builtins.print"}) {
    const std::string text = message(target);
    EXPECT_NE(text.find("node 'n0'"), std::string::npos) << text;
    EXPECT_NE(text.find(target), std::string::npos) << text;
  }
  EXPECT_NE(message("torch.ops.higher_order.cond").find("run_decompositions({})"), std::string::npos);
}

TEST(EagerEngine, ErrorsInsideAnOperatorNameIt) {
  GraphBuilder g;
  g.weight("table", at::zeros({5, 2}));
  g.input("ids", DType::kInt64, {kBatch});
  const std::string y = g.node("torch.ops.aten.embedding.default",
                               {{"weight", tensor("table")}, {"indices", tensor("ids")}}, DType::kFloat32, {kBatch, 2});
  const auto engine = make_eager_engine(g.finish({y}), {});
  const std::vector<at::Tensor> inputs{at::full({3}, 7, at::kLong)};
  const std::string text = message_of([&] { engine->run(inputs); });
  EXPECT_NE(text.find("node 'n0' (torch.ops.aten.embedding.default)"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(EagerEngine, ModelAssertionsHold) {
  GraphBuilder g;
  g.input("x", DType::kFloat32, {kBatch});
  const std::string rows = g.number("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}});
  const std::string enough = g.number("_operator.ge", {{"a", symbol(rows)}, {"b", integer(3)}});
  g.call("torch.ops.aten._assert_scalar.default",
         {{"self", symbol(enough)}, {"assert_msg", std::string("need 3 rows")}});
  const graph::Archive archive = g.finish({"x"});
  EXPECT_EQ(message_of([&] { run(archive, {at::zeros({3})}); }), "");
  EXPECT_NE(message_of([&] { run(archive, {at::zeros({2})}); }).find("need 3 rows"), std::string::npos);
}

TEST(EagerEngine, ProfileCountsWhatTheAllocatorGave) {
  GraphBuilder g;
  g.input("x", DType::kFloat32, {kBatch, 100});
  const std::string view = g.node("torch.ops.aten.unsqueeze.default", {{"self", tensor("x")}, {"dim", integer(0)}},
                                  DType::kFloat32, {1, kBatch, 100});
  const std::string y =
      g.node("torch.ops.aten.relu.default", {{"self", tensor(view)}}, DType::kFloat32, {1, kBatch, 100});
  // The logical negation inside makes temporaries beyond the result.
  const std::string z =
      g.node("torch.ops.aten.logsumexp.default", {{"self", tensor(y)}, {"dim", std::vector<std::int64_t>{2}}},
             DType::kFloat32, {1, kBatch});
  const auto engine = make_eager_engine(g.finish({z}), {});
  std::vector<NodeCost> costs;
  const std::vector<at::Tensor> inputs{at::randn({50, 100})};
  engine->run_profiled(inputs, costs);
  ASSERT_EQ(costs.size(), 3U);
  EXPECT_EQ(costs[0].allocated_bytes, 0);
  EXPECT_EQ(costs[0].output_bytes, 0);
  EXPECT_EQ(costs[1].allocated_bytes, 50 * 100 * 4);
  EXPECT_EQ(costs[1].output_bytes, 50 * 100 * 4);
  EXPECT_EQ(costs[2].output_bytes, 50 * 4);
  EXPECT_GT(costs[2].allocated_bytes, costs[2].output_bytes);
  EXPECT_EQ(costs[0].peak_bytes, 0);
  EXPECT_EQ(costs[1].peak_bytes, 50 * 100 * 4);
  EXPECT_GT(costs[2].peak_bytes, costs[1].peak_bytes);
}

TEST(EagerEngine, PeakMemoryForgetsWhatIsFreed) {
  GraphBuilder g;
  std::string value = g.input("x", DType::kFloat32, {kBatch, 100});
  for (int i = 0; i < 5; ++i) {
    value = g.node("torch.ops.aten.relu.default", {{"self", tensor(value)}}, DType::kFloat32, {kBatch, 100});
  }
  const auto engine = make_eager_engine(g.finish({value}), {});
  std::vector<NodeCost> costs;
  const std::vector<at::Tensor> inputs{at::randn({50, 100})};
  engine->run_profiled(inputs, costs);
  ASSERT_EQ(costs.size(), 5U);
  EXPECT_EQ(costs[4].peak_bytes, 2 * 50 * 100 * 4) << "the operand and the result, not all five results";
}

TEST(EagerEngine, ConcurrentRunsGiveTheSameBits) {
  const graph::Archive archive = small_model(at::randn({2, 3}), at::randn({2}));
  EngineOptions options;
  options.threads = 2;
  options.concurrent = 2;
  const auto engine = make_eager_engine(archive, options);
  std::vector<std::vector<at::Tensor>> inputs;
  std::vector<at::Tensor> expected;
  for (int i = 0; i < 4; ++i) {
    inputs.push_back({at::randn({7 + i, 3})});
    expected.push_back(engine->run(inputs.back())[0]);
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) wrong += at::equal(engine->run(inputs[t])[0], expected[t]) ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(EagerEngine, ThreadCountOfTheCallerIsLeftAsItWas) {
  const graph::Archive archive = small_model(at::randn({2, 3}), at::randn({2}));
  EngineOptions options;
  options.threads = 4;
  options.concurrent = 4;
  const auto engine = make_eager_engine(archive, options);
  const std::vector<at::Tensor> inputs{at::randn({2, 3})};
  at::set_num_threads(2);
  engine->run(inputs);
  EXPECT_EQ(at::get_num_threads(), 2);
  // The count belongs to a thread: another one's engine does not change it.
  std::thread([&] { at::set_num_threads(1); }).join();
  EXPECT_EQ(at::get_num_threads(), 2);
}

TEST(EagerEngine, DispatchIsCheap) {
  const double overhead = operator_overhead_ns();
  RecordProperty("overhead_ns", std::to_string(overhead));
  EXPECT_LT(overhead, 5000) << "an operator should cost about half a microsecond over its kernel";
}

}  // namespace
}  // namespace ikbo::runtime
