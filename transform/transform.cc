#include "transform/transform.h"

#include <algorithm>
#include <set>

#include "graph/error.h"
#include "transform/assemble.h"
#include "transform/bags.h"
#include "transform/builder.h"
#include "transform/functional.h"
#include "transform/general_form.h"
#include "transform/inputs.h"
#include "transform/multiples.h"
#include "transform/rewriter.h"
#include "transform/simplify.h"
#include "transform/strength.h"

namespace ikbo::transform {
namespace {

using graph::Expr;
using graph::InputKind;
using graph::Program;
using graph::TensorArg;

constexpr const char* kRemedy = "export the model with ep.run_decompositions({}) before saving it";

// What the rewriting relies on: a functional graph whose values mean the same whatever their memory layout.
void check_understood(const Program& program) {
  for (const graph::OutputSpec& spec : program.output_specs) {
    if (!spec.user_output) {
      fail("the program changes a buffer, parameter or input in place ({}): {}", spec.json.begin().key(), kRemedy);
    }
  }
  for (const graph::InputSpec& spec : program.input_specs) {
    if (spec.kind == InputKind::kCustomObject || spec.kind == InputKind::kToken) {
      fail("the program takes a custom object or an effect token as input, which the transform does not support");
    }
    if (spec.kind == InputKind::kUserInput && std::holds_alternative<graph::SymInt>(spec.value)) {
      fail("the program takes a symbolic integer as input; pass it as a tensor, or export it as a constant");
    }
  }
  static const std::set<std::string, std::less<>> kLayout{"as_strided", "as_strided_copy", "set", "resize",
                                                          "_reshape_alias"};
  for (const graph::Node& node : program.graph.nodes) {
    if (node.target.starts_with("torch.ops.higher_order.")) {
      fail("node '{}' ({}) holds a sub-graph: {}", node.name, node.target, kRemedy);
    }
    for (const graph::NamedArgument& a : node.inputs) {
      if (const auto* raw = std::get_if<graph::RawArg>(&a.value); raw != nullptr && raw->json.contains("as_graph")) {
        fail("node '{}' ({}) holds a sub-graph: {}", node.name, node.target, kRemedy);
      }
    }
    if (is_in_place(node.target)) fail("node '{}' ({}) works in place: {}", node.name, node.target, kRemedy);
    if (kLayout.contains(aten_name(node.target))) {
      fail("node '{}' ({}) depends on how its operand lies in memory, which the transform may change", node.name,
           node.target);
    }
    if (node.target.starts_with("torch.ops.ikbo.")) {
      fail("node '{}' is {}: the program is transformed already, or calls IKBO operators itself", node.name,
           node.target);
    }
  }
}

void substitute(graph::Graph& graph, const std::map<std::string, Expr>& values) {
  for (auto& [name, meta] : graph.tensors) {
    for (Expr& e : meta.sizes) e = e.substitute(values);
    for (Expr& e : meta.strides) e = e.substitute(values);
    meta.storage_offset = meta.storage_offset.substitute(values);
  }
  for (auto& [name, e] : graph.sym_ints) e = e.substitute(values);
}

std::string fresh_symbol(const Program& program) {
  std::int64_t largest = 0;
  const auto see = [&](const std::string& symbol) {
    if (symbol.size() > 1 && symbol.size() < 10 && std::isdigit(static_cast<unsigned char>(symbol[1])) != 0) {
      largest = std::max<std::int64_t>(largest, std::atoll(symbol.c_str() + 1));
    }
  };
  for (const auto& [symbol, range] : program.ranges) see(symbol);
  for (const auto& [name, meta] : program.graph.tensors) {
    for (const Expr& e : meta.sizes) {
      for (const std::string& s : e.symbols()) see(s);
    }
  }
  return fmt::format("s{}", largest + 1);
}

graph::Graph general_form(const graph::Graph& original, const InputSides& sides) {
  InnerBroadcast given{sides.candidate_symbol, sides.user_symbols, sides.single, {}, sides.index};
  for (const graph::InputEntry& entry : sides.inputs) {
    const bool batched = entry.side == graph::Side::kRequestOnly || entry.side == graph::Side::kCandidate;
    if (batched && !sides.single.contains(entry.value)) given.batched.insert(entry.value);
  }
  return GeneralForm(original, std::move(given)).run();
}

// The input that says which user a candidate belongs to: the model's own, or a new one. Returns it as int32.
std::string add_index(Builder& builder, const graph::Graph& original, const InputSides& sides, Assembly& assembly) {
  graph::TensorMeta meta;
  meta.dtype = graph::DType::kInt32;
  meta.sizes = {Expr::symbol(assembly.candidate_symbol)};
  meta.strides = {1};
  for (const graph::InputEntry& entry : assembly.inputs) {
    if (entry.side == graph::Side::kCandidate) meta.device = original.tensors.at(entry.value).device;
  }
  assembly.own_index = !sides.index.empty();
  assembly.index = assembly.own_index ? sides.index : builder.fresh("candidate_to_user");
  const graph::DType given = assembly.own_index ? original.tensors.at(sides.index).dtype : meta.dtype;
  graph::TensorMeta input = meta;
  input.dtype = given;
  builder.graph.tensors.emplace(assembly.index, input);
  builder.anchor(assembly.candidate_symbol, assembly.index, 0);
  if (given == meta.dtype) return assembly.index;
  return builder.emit("torch.ops.aten._to_copy.default",
                      {{"self", TensorArg{assembly.index}, 1}, {"dtype", graph::DTypeArg{meta.dtype}, 2}},
                      "candidate_to_user", meta, graph::Role::kConstant);
}

}  // namespace

Mode parse_mode(const std::string& name) {
  if (name == "ikbo") return Mode::kIkbo;
  if (name == "split") return Mode::kSplit;
  if (name == "broadcast") return Mode::kBroadcast;
  fail("mode '{}' is none of ikbo, split, broadcast", name);
}

std::string mode_name(Mode mode) {
  return mode == Mode::kIkbo ? "ikbo" : mode == Mode::kSplit ? "split" : "broadcast";
}

Result transform(const graph::Archive& given, const Options& options) {
  if (given.extra_files.contains(graph::Specification::kFile)) {
    fail("the archive is transformed already; transform the original again instead");
  }
  if (needs_functional(given.program)) {
    graph::Archive without = given;
    without.program = functional(given.program);
    return transform(without, options);
  }
  check_understood(given.program);
  graph::Archive archive = even_bags(given);
  const Program& program = archive.program;
  const auto inputs = graph::user_inputs(program);
  RequestOnly request_only = select_request_only(program, inputs, options.request_only);

  Result result;
  Assembly assembly;
  assembly.mode = options.mode;

  const InputSides sides = sides_of(program, inputs, request_only, options.index);
  // Other modes keep the original's operators, but for those that would be refused.
  if (options.mode == Mode::kIkbo || sides.broadcasts_inside()) {
    archive = reduce_strength(archive, options.mode == Mode::kIkbo ? Strengths::kAll : Strengths::kRows);
    if (options.mode == Mode::kIkbo) archive = multiply_last(archive);
  }
  assembly.inputs = sides.inputs;
  assembly.candidate_symbol = sides.candidate_symbol;
  for (const JaggedBags& bags : sides.jagged) assembly.jagged.push_back(bags.input);
  const auto& symbols = sides.symbols;
  if (symbols.size() > 1 && sides.index.empty()) {
    result.report.warnings.push_back(
        fmt::format("the export has separate batch sizes ({}); they are taken as one. If the model looks up "
                    "request-only rows by an "
                    "input of its own, name that input with --index",
                    fmt::join(symbols, ", ")));
  }
  graph::Graph original = program.graph;
  std::map<std::string, Expr> unify;
  graph::Range range;
  std::optional<std::int64_t> max_users = options.max_users;
  for (const std::string& s : symbols) {
    const auto it = program.ranges.find(s);
    if (sides.user_symbols.contains(s)) {
      if (it != program.ranges.end() && it->second.max)
        max_users = std::min(max_users.value_or(*it->second.max), *it->second.max);
      continue;
    }
    if (s != assembly.candidate_symbol) unify.emplace(s, Expr::symbol(assembly.candidate_symbol));
    if (it != program.ranges.end()) {
      if (it->second.min) range.min = std::max(range.min.value_or(*it->second.min), *it->second.min);
      if (it->second.max) range.max = std::min(range.max.value_or(*it->second.max), *it->second.max);
    }
  }
  if (!unify.empty()) substitute(original, unify);
  forget_templates(original);
  if (sides.broadcasts_inside()) original = general_form(original, sides);
  if (options.mode == Mode::kIkbo) simplify(original);
  assembly.retired_symbols.assign(symbols.begin(), symbols.end());
  assembly.user_symbol = fresh_symbol(program);
  assembly.candidate_range = range;
  if (options.max_candidates) {
    assembly.candidate_range.max = std::min(range.max.value_or(*options.max_candidates), *options.max_candidates);
  }
  // Operators that moved to the user batch compute each row alone: one user is always enough, whatever the export says.
  assembly.user_range = {range.min.value_or(0) == 0 ? 0 : 1, max_users};

  // The new program's inputs keep their names; new ones are the index and the request-only columns of packed inputs.
  Builder builder(assembly.candidate_symbol, assembly.user_symbol);
  for (const graph::Argument& a : original.inputs) {
    for (const std::string& name : graph::value_names(a)) builder.reserve(name);
  }
  const std::string index = add_index(builder, original, sides, assembly);
  Rewriter rewriter(archive, original, options.mode, builder, result.report, index);
  for (const graph::InputSpec& spec : program.input_specs) {
    const auto* t = std::get_if<TensorArg>(&spec.value);
    if (t == nullptr || spec.kind == InputKind::kUserInput) continue;
    builder.graph.tensors.emplace(t->name, original.tensors.at(t->name));
    rewriter.bind_input(t->name, {Level::kShared, {}, {}, t->name, nullptr, {}});
  }
  std::set<std::string> of_bags;  // values and offsets of bags of many lengths
  for (const JaggedBags& bags : sides.jagged) {
    of_bags.insert(bags.input.offsets);
    of_bags.insert(bags.input.values.begin(), bags.input.values.end());
    if (request_only.whole.contains(bags.input.offsets)) rewriter.bind_bags(bags);
  }
  for (const graph::InputEntry& entry : assembly.inputs) {
    const graph::TensorMeta& meta = original.tensors.at(entry.value);
    Value value;
    if (!of_bags.contains(entry.value)) value.batch = Batch{0, 1};
    switch (entry.side) {
      case graph::Side::kRequestOnly:
        value.level = Level::kUser;
        value.at_user = entry.value;
        builder.graph.tensors.emplace(entry.value, builder.at(meta, Where::kUser));
        if (!of_bags.contains(entry.value)) builder.anchor(assembly.user_symbol, entry.value, 0);
        break;
      case graph::Side::kCandidate:
        value.level = Level::kCandidate;
        if (request_only.columns.contains(entry.value)) {
          value.parts = assembly.split_packed(builder, entry, meta, request_only.columns.at(entry.value));
        } else {
          value.at_candidate = entry.value;
          builder.graph.tensors.emplace(entry.value, meta);
        }
        break;
      case graph::Side::kIndex:  // nothing else reads it
        continue;
      case graph::Side::kShared:
        value.level = Level::kShared;
        value.batch.reset();
        value.at_candidate = entry.value;
        builder.graph.tensors.emplace(entry.value, meta);
    }
    for (std::size_t d = 0; d < meta.sizes.size(); ++d) {
      const auto own = meta.sizes[d].symbols();
      if (own.size() == 1 && meta.sizes[d] == Expr::symbol(*own.begin()) && *own.begin() != assembly.candidate_symbol) {
        builder.anchor(*own.begin(), entry.value, static_cast<int>(d));
      }
    }
    if (value.level == Level::kUser && of_bags.contains(entry.value)) continue;
    rewriter.bind_input(entry.value, std::move(value));
  }

  rewriter.run();
  bool any_candidate = false;
  for (const graph::Argument& out : original.outputs) {
    for (const std::string& name : graph::value_names(out)) {
      any_candidate = any_candidate || rewriter.depends_on_candidates(name);
    }
  }
  if (!any_candidate)
    fail("no output depends on an input that differs from candidate to candidate: there is nothing to rank");
  for (const graph::Argument& out : original.outputs) {
    if (const auto* t = std::get_if<TensorArg>(&out)) {
      builder.graph.outputs.push_back(TensorArg{rewriter.output(t->name)});
    } else if (graph::value_names(out).empty()) {
      builder.graph.outputs.push_back(out);
    } else {
      fail("output '{}' is no tensor, which the transform does not support", graph::value_names(out)[0]);
    }
  }
  assembly.finish(archive, original, builder, result);
  return result;
}

}  // namespace ikbo::transform
