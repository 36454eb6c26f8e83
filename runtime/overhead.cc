#include "runtime/overhead.h"

#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "graph/archive.h"
#include "graph/error.h"
#include "runtime/engine.h"

namespace ikbo::runtime {
namespace {

constexpr int kOperators = 500;
constexpr int kRepeats = 20;

// x + x + x + ...
graph::Archive chain() {
  graph::Archive archive;
  graph::Program& program = archive.program;
  program.module_call_graph = graph::Json::parse(R"([{"fqn": "", "signature": {"forward_arg_names": []}}])");
  program.module_call_graph[0]["signature"]["in_spec"] =
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
          {"type": "builtins.tuple", "context": "null", "children_spec": []},
          {"type": "builtins.dict", "context": "[]", "children_spec": []}]}])";
  graph::TensorMeta meta;
  meta.sizes = {8};
  meta.strides = {1};
  program.graph.tensors["x"] = meta;
  graph::append_user_input(program, "x");
  std::string last = "x";
  for (int i = 0; i < kOperators; ++i) {
    graph::Node node;
    node.target = "torch.ops.aten.add.Tensor";
    node.name = fmt::format("add_{}", i);
    node.inputs = {{"self", graph::TensorArg{last}, 1}, {"other", graph::TensorArg{"x"}, 1}};
    node.outputs = {graph::TensorArg{node.name}};
    program.graph.tensors[node.name] = meta;
    last = node.name;
    program.graph.nodes.push_back(std::move(node));
  }
  program.graph.outputs = {graph::TensorArg{last}};
  graph::OutputSpec output;
  output.value = graph::TensorArg{last};
  program.output_specs.push_back(std::move(output));
  return archive;
}

template <typename Function>
double smallest_ns(const Function& function) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    function();
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

double operator_overhead_ns() {
  EngineOptions options;
  options.threads = 1;
  const auto engine = make_eager_engine(chain(), options);
  const at::Tensor x = at::ones({8});
  const std::vector<at::Tensor> inputs{x};
  const double with_engine = smallest_ns([&] { engine->run(inputs); });
  const double by_hand = smallest_ns([&] {
    const c10::InferenceMode inference;
    const at::Tensor alias = at::ones({8});
    at::Tensor last = alias;
    for (int i = 0; i < kOperators; ++i) last = at::add(last, alias);
  });
  return (with_engine - by_hand) / kOperators;
}

}  // namespace ikbo::runtime
