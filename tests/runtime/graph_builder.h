#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graph/archive.h"
#include "graph/error.h"
#include "graph/specification.h"

namespace ikbo::testing {

using graph::Argument;
using graph::DType;
using graph::Expr;
using graph::Range;
using graph::TensorArg;

inline Argument tensor(const std::string& name) {
  return TensorArg{name};
}
inline Argument symbol(const std::string& name) {
  return graph::SymInt{name};
}
inline Argument integer(std::int64_t value) {
  return value;
}

/// Makes small programs in memory, as an archive would hold them.
class GraphBuilder {
 public:
  GraphBuilder() {
    auto& calls = archive_.program.module_call_graph;
    calls = graph::Json::parse(R"([{"fqn": "", "signature": {"forward_arg_names": []}}])");
    calls[0]["signature"]["in_spec"] =
        R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
            {"type": "builtins.tuple", "context": "null", "children_spec": []},
            {"type": "builtins.dict", "context": "[]", "children_spec": []}]}])";
  }

  GraphBuilder& range(const std::string& name, Range range) {
    archive_.program.ranges[name] = range;
    return *this;
  }

  std::string input(const std::string& name, DType dtype, std::vector<Expr> sizes) {
    describe(name, dtype, std::move(sizes));
    graph::append_user_input(archive_.program, name);
    return name;
  }

  std::string weight(const std::string& name, const at::Tensor& value) {
    std::vector<Expr> sizes;
    for (const std::int64_t size : value.sizes()) sizes.emplace_back(size);
    describe(name, graph::dtype_of(value.scalar_type()), std::move(sizes));
    graph::InputSpec spec;
    spec.kind = graph::InputKind::kParameter;
    spec.value = TensorArg{name};
    spec.target = name;
    auto& program = archive_.program;
    program.input_specs.insert(program.input_specs.begin(), spec);
    program.graph.inputs.insert(program.graph.inputs.begin(), TensorArg{name});
    archive_.weights[name] = graph::make_weight(value, true);
    return name;
  }

  /// An operator with one tensor result of the given type and sizes.
  std::string node(const std::string& target, std::vector<std::pair<std::string, Argument>> arguments, DType dtype,
                   std::vector<Expr> sizes) {
    const std::string name = add(target, std::move(arguments));
    describe(name, dtype, std::move(sizes));
    archive_.program.graph.nodes.back().outputs = {TensorArg{name}};
    return name;
  }

  /// An operator with one symbolic integer as its result.
  std::string number(const std::string& target, std::vector<std::pair<std::string, Argument>> arguments) {
    const std::string name = add(target, std::move(arguments));
    archive_.program.graph.sym_ints[name] = Expr::symbol("u" + name);
    archive_.program.graph.nodes.back().outputs = {graph::SymInt{name}};
    return name;
  }

  /// An operator without a result that anything reads, or with results set by the caller.
  graph::Node& call(const std::string& target, std::vector<std::pair<std::string, Argument>> arguments) {
    add(target, std::move(arguments));
    return archive_.program.graph.nodes.back();
  }

  void describe(const std::string& name, DType dtype, std::vector<Expr> sizes) {
    graph::TensorMeta meta;
    meta.dtype = dtype;
    meta.strides = graph::contiguous_strides(sizes);
    meta.sizes = std::move(sizes);
    archive_.program.graph.tensors[name] = std::move(meta);
  }

  graph::Archive finish(const std::vector<std::string>& outputs) {
    for (const std::string& name : outputs) {
      graph::OutputSpec spec;
      spec.value = archive_.program.graph.tensors.contains(name) ? tensor(name) : symbol(name);
      archive_.program.graph.outputs.push_back(spec.value);
      archive_.program.output_specs.push_back(std::move(spec));
    }
    return archive_;
  }

 private:
  std::string add(const std::string& target, std::vector<std::pair<std::string, Argument>> arguments) {
    graph::Node node;
    node.target = target;
    node.name = "n" + std::to_string(archive_.program.graph.nodes.size());
    for (auto& [name, value] : arguments) node.inputs.push_back({name, std::move(value), 1});
    archive_.program.graph.nodes.push_back(std::move(node));
    return archive_.program.graph.nodes.back().name;
  }

  graph::Archive archive_;
};

/// The message of the ikbo::Error that `function` throws; empty where it throws none.
template <typename Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace ikbo::testing
