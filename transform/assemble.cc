#include "transform/assemble.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>

#include "graph/error.h"
#include "graph/jagged.h"
#include "transform/simplify.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::InputKind;
using graph::Json;
using graph::Node;
using graph::Program;
using graph::Role;
using graph::Side;
using graph::TensorArg;

Parts Assembly::split_packed(Builder& builder, const graph::InputEntry& entry, const graph::TensorMeta& meta,
                             const std::vector<std::pair<std::int64_t, std::int64_t>>& user_columns) {
  const std::int64_t columns = *meta.sizes[1].as_integer();
  std::int64_t user_width = 0;
  for (const auto& [from, to] : user_columns) user_width += to - from;

  graph::PackedInput record{entry.name, builder.fresh(entry.value + "_user"), entry.value, user_columns, columns};
  const auto narrow = [&](std::int64_t width, Where where) {
    graph::TensorMeta m = builder.at(meta, where);
    m.sizes[1] = width;
    m.strides = graph::contiguous_strides(m.sizes);
    return m;
  };
  builder.graph.tensors.emplace(record.user_value, narrow(user_width, Where::kUser));
  builder.graph.tensors.emplace(record.candidate_value, narrow(columns - user_width, Where::kCandidate));
  builder.anchor(user_symbol, record.user_value, 0);

  Parts parts{1, meta.sizes, {}};
  std::int64_t user_at = 0;
  std::int64_t candidate_at = 0;
  const auto take = [&](Where where, std::int64_t width) {
    std::int64_t& at = where == Where::kUser ? user_at : candidate_at;
    const std::string& value = where == Where::kUser ? record.user_value : record.candidate_value;
    Term term{where,
              builder.slice(value, 1, at, at + width, where == Where::kUser ? Role::kRequestOnly : Role::kCandidate),
              meta.sizes};
    term.sizes[1] = width;
    parts.pieces.push_back({{std::move(term)}, width});
    at += width;
  };
  std::int64_t column = 0;
  for (const auto& [from, to] : user_columns) {
    if (from > column) take(Where::kCandidate, from - column);
    take(Where::kUser, to - from);
    column = to;
  }
  if (column < columns) take(Where::kCandidate, columns - column);
  packed.push_back(std::move(record));
  return parts;
}

void Assembly::finish(const graph::Archive& source, const graph::Graph& original, Builder& builder, Result& result) {
  drop_dead(builder, original);
  if (mode == Mode::kIkbo) {
    fold_norms(source, builder);
    fuse_activations(builder);
  }
  result.report.nodes_before = static_cast<int>(source.program.graph.nodes.size());
  result.report.nodes_after = static_cast<int>(builder.graph.nodes.size());
  sign(source, builder, result);
  guard(source, result);
  sample(source, result);
  specify(builder, result);
}

// Nodes that nothing reads go; a check of metadata keeps nothing alive.
void Assembly::drop_dead(Builder& builder, const graph::Graph& original) {
  graph::Graph& graph = builder.graph;
  std::set<std::string> alive;
  for (const Argument& out : graph.outputs) {
    for (std::string& name : graph::value_names(out)) alive.insert(std::move(name));
  }
  std::vector<Node> kept;
  const auto is_metadata_check = [](const Node& n) { return aten_name(n.target) == "_assert_tensor_metadata"; };
  for (auto it = graph.nodes.rbegin(); it != graph.nodes.rend(); ++it) {
    const auto outs = graph::output_names(*it);
    const bool used = std::any_of(outs.begin(), outs.end(), [&](const std::string& n) { return alive.contains(n); });
    if (!used && !(outs.empty() && !is_metadata_check(*it)) && !is_metadata_check(*it)) continue;
    if (!is_metadata_check(*it)) {
      for (std::string& name : graph::input_names(*it)) alive.insert(std::move(name));
    }
    kept.push_back(std::move(*it));
  }
  std::reverse(kept.begin(), kept.end());
  std::set<std::string> made;
  for (const Node& n : kept) {
    for (std::string& name : graph::output_names(n)) made.insert(std::move(name));
  }
  std::set<std::string> input_values;
  for (const Argument& a : original.inputs) {
    for (std::string& name : graph::value_names(a)) input_values.insert(std::move(name));
  }
  std::erase_if(kept, [&](const Node& n) {
    if (!is_metadata_check(n)) return false;
    const auto names = graph::input_names(n);
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return !made.contains(name) && !input_values.contains(name); });
  });
  graph.nodes = std::move(kept);
}

void Assembly::sign(const graph::Archive& source, Builder& builder, Result& result) {
  const Program& before = source.program;
  graph::Archive& archive = result.archive;
  Program& program = archive.program;
  program.rest = before.rest;
  program.module_call_graph = before.module_call_graph;
  for (Json& entry : program.module_call_graph) {  // call signatures of inner modules name values that may be gone
    if (entry.is_object() && entry.value("fqn", "") != "") entry["signature"] = nullptr;
  }
  program.hints = before.hints;
  program.ranges = before.ranges;
  for (const std::string& s : retired_symbols) program.ranges.erase(s);
  // Ranges of expressions (batch + 1) follow from those of their symbols.
  std::erase_if(program.ranges, [](const auto& range) { return range.first.find(' ') != std::string::npos; });
  program.ranges[candidate_symbol] = candidate_range;
  program.ranges[user_symbol] = user_range;
  const std::int64_t example = before.hints.contains(candidate_symbol) ? before.hints.at(candidate_symbol) : 8;
  program.hints[candidate_symbol] = example;
  program.hints[user_symbol] = example == 2 ? 3 : 2;

  // Parameters that only a replaced operator read are gone with it; inputs that nothing ever read stay.
  std::set<std::string> read;
  for (const Node& n : builder.graph.nodes) {
    for (std::string& name : graph::input_names(n)) read.insert(std::move(name));
  }
  for (const Argument& out : builder.graph.outputs) {
    for (std::string& name : graph::value_names(out)) read.insert(std::move(name));
  }
  std::set<std::string> read_before;
  for (const Node& n : before.graph.nodes) {
    for (std::string& name : graph::input_names(n)) read_before.insert(std::move(name));
  }
  std::set<std::string> targets_kept;
  const auto push = [&](graph::InputSpec spec, Argument value) {
    program.graph.inputs.push_back(std::move(value));
    program.input_specs.push_back(std::move(spec));
  };
  std::vector<Builder::NewParameter> added;
  for (const Builder::NewParameter& p : builder.parameters()) {
    if (read.contains(p.value)) added.push_back(p);
  }
  bool added_pushed = false;
  const auto push_added = [&] {
    if (added_pushed) return;
    added_pushed = true;
    for (const Builder::NewParameter& p : added) {
      graph::InputSpec spec;
      spec.kind = InputKind::kParameter;
      spec.value = TensorArg{p.value};
      spec.target = p.target;
      push(spec, TensorArg{p.value});
      archive.weights.emplace(p.target, p.weight);
    }
  };
  for (std::size_t i = 0; i < before.input_specs.size(); ++i) {
    const graph::InputSpec& spec = before.input_specs[i];
    if (spec.kind != InputKind::kParameter) push_added();
    if (const auto* t = std::get_if<TensorArg>(&spec.value); t != nullptr && !spec.target.empty()) {
      if (read_before.contains(t->name) && !read.contains(t->name)) {
        builder.graph.tensors.erase(t->name);
        continue;
      }
      targets_kept.insert(spec.target);
    }
    push(spec, before.graph.inputs[i]);
  }
  push_added();
  for (const auto& [target, weight] : source.weights) {
    if (targets_kept.contains(target)) archive.weights.emplace(target, weight);
  }
  for (const auto& [target, weight] : source.constants) {
    if (targets_kept.contains(target)) archive.constants.emplace(target, weight);
  }

  program.graph.outputs = builder.graph.outputs;
  program.graph.nodes = builder.graph.nodes;
  program.graph.single_tensor_return = before.graph.single_tensor_return;
  program.graph.custom_objects = before.graph.custom_objects;
  program.output_specs = before.output_specs;
  for (std::size_t i = 0; i < program.output_specs.size(); ++i) {
    program.output_specs[i].value = program.graph.outputs[i];
  }

  // Only what is still there: inputs, and values that kept nodes make.
  std::set<std::string> values;
  for (const Argument& a : program.graph.inputs) {
    for (std::string& name : graph::value_names(a)) values.insert(std::move(name));
  }
  for (const graph::PackedInput& p : packed) values.insert(p.user_value);
  values.insert(index);
  for (const Node& n : program.graph.nodes) {
    for (std::string& name : graph::output_names(n)) values.insert(std::move(name));
  }
  for (const std::string& name : values) {
    if (const auto it = builder.graph.tensors.find(name); it != builder.graph.tensors.end()) {
      program.graph.tensors.insert(*it);
    } else if (const auto sym = builder.graph.sym_ints.find(name); sym != builder.graph.sym_ints.end()) {
      program.graph.sym_ints.insert(*sym);
    } else if (builder.graph.sym_bools.contains(name)) {
      program.graph.sym_bools[name] = builder.graph.sym_bools[name];
    } else if (builder.graph.sym_floats.contains(name)) {
      program.graph.sym_floats[name] = builder.graph.sym_floats[name];
    }
  }
  for (const graph::PackedInput& p : packed) graph::append_user_input(program, p.user_value);
  if (!own_index) graph::append_user_input(program, index);
}

// Guards are what module() checks of a call's sizes. Those on batch sizes are made anew for two batches; those that do
// not mention a first dimension or a packed input stay.
void Assembly::guard(const graph::Archive& source, Result& result) {
  Program& program = result.archive.program;
  const auto source_name = [](const std::string& path) {  // x['user_id'] -> L['x']['user_id']
    const std::size_t end = path.find_first_of("[.");
    return fmt::format("L['{}']{}", path.substr(0, end), end == std::string::npos ? "" : path.substr(end));
  };
  std::set<std::string> packed_values;
  for (const graph::PackedInput& p : packed) packed_values.insert(p.candidate_value);
  std::vector<std::string> packed_names;
  std::map<std::string, std::string> first;  // symbol -> the input that shows it
  std::vector<std::string> equalities;
  for (const graph::UserInput& input : graph::user_inputs(program)) {
    const auto& meta = program.graph.tensors.at(input.value);
    if (packed_values.contains(input.value)) packed_names.push_back(source_name(input.path));
    if (meta.sizes.empty()) continue;
    for (const std::string& symbol : {user_symbol, candidate_symbol}) {
      if (!(meta.sizes[0] == Expr::symbol(symbol))) continue;
      const std::string size = source_name(input.path) + ".size()[0]";
      const auto [it, inserted] = first.emplace(symbol, size);
      if (!inserted) equalities.push_back(fmt::format("{} == {}", size, it->second));
    }
  }
  for (const std::string& guard : source.program.guards) {
    const bool batch = guard.find(".size()[0]") != std::string::npos;
    const bool on_packed = std::any_of(packed_names.begin(), packed_names.end(),
                                       [&](const std::string& name) { return guard.find(name) != std::string::npos; });
    if (!batch && !on_packed) program.guards.push_back(guard);
  }
  program.guards.insert(program.guards.end(), equalities.begin(), equalities.end());
}

// Sample inputs of the right sizes, types and ids: the original's rows, fewer of them for the users.
void Assembly::sample(const graph::Archive& source, Result& result) {
  const Program& program = result.archive.program;
  const auto before = graph::user_inputs(source.program);
  std::map<std::string, at::Tensor> given;
  if (source.sample_inputs.size() == before.size()) {
    for (std::size_t i = 0; i < before.size(); ++i) given[before[i].value] = source.sample_inputs[i];
  }
  const auto rows = [](const at::Tensor& t, std::int64_t count) {  // the first rows, repeated where there are too few
    if (t.dim() == 0 || t.size(0) == 0) return t;
    return t.index_select(0, at::arange(count, at::kLong).remainder(t.size(0))).contiguous();
  };
  const std::int64_t users = program.hints.at(user_symbol);
  const std::int64_t candidates = program.hints.at(candidate_symbol);
  for (const graph::PackedInput& p : packed) {
    const auto it = given.find(p.candidate_value);
    if (it == given.end()) continue;
    std::vector<at::Tensor> user_columns;
    std::vector<at::Tensor> candidate_columns;
    std::int64_t column = 0;
    const at::Tensor whole = it->second;
    for (const auto& [from, to] : p.user_columns) {
      candidate_columns.push_back(whole.slice(1, column, from));
      user_columns.push_back(whole.slice(1, from, to));
      column = to;
    }
    candidate_columns.push_back(whole.slice(1, column));
    given[p.user_value] = at::cat(user_columns, 1);
    given[p.candidate_value] = at::cat(candidate_columns, 1);
  }
  for (const graph::JaggedInput& bags : jagged) {
    if (!given.contains(bags.offsets)) continue;
    graph::JaggedRows own{{}, given.at(bags.offsets)};
    for (const std::string& value : bags.values) own.values.push_back(given.at(value));
    const std::int64_t count = own.offsets.numel() - (bags.includes_end ? 1 : 0);
    const bool of_users = program.graph.tensors.at(bags.offsets).sizes[0].depends_on(user_symbol);
    if (count <= 0) continue;
    const auto chosen =
        graph::select_bags(bags, own, at::arange(of_users ? users : candidates, at::kLong).remainder(count));
    given[bags.offsets] = chosen.offsets;
    for (std::size_t i = 0; i < bags.values.size(); ++i) given[bags.values[i]] = chosen.values[i];
  }
  for (const graph::UserInput& input : graph::user_inputs(program)) {
    const auto& meta = program.graph.tensors.at(input.value);
    if (input.value == index) {
      result.archive.sample_inputs.push_back(at::arange(candidates, graph::scalar_type(meta.dtype)).remainder(users));
      continue;
    }
    const bool batched = !meta.sizes.empty();
    const auto it = given.find(input.value);
    if (it != given.end() && (!batched || it->second.dim() == static_cast<std::int64_t>(meta.sizes.size()))) {
      at::Tensor t = it->second;
      if (batched && meta.sizes[0] == Expr::symbol(user_symbol)) t = rows(t, users);
      if (batched && meta.sizes[0] == Expr::symbol(candidate_symbol)) t = rows(t, candidates);
      result.archive.sample_inputs.push_back(t);
      continue;
    }
    std::vector<std::int64_t> sizes;
    for (const Expr& e : meta.sizes) sizes.push_back(e.evaluate(program.hints).value_or(2));
    result.archive.sample_inputs.push_back(at::zeros(sizes, graph::scalar_type(meta.dtype)));
  }
}

void Assembly::specify(const Builder& builder, Result& result) {
  const Program& program = result.archive.program;
  graph::Specification& spec = result.specification;
  spec.mode = mode_name(mode);
  spec.user_symbol = user_symbol;
  spec.candidate_symbol = candidate_symbol;
  spec.user_range = user_range;
  spec.candidate_range = candidate_range;
  spec.packed = packed;
  spec.jagged = jagged;
  std::map<std::string, Side> sides;
  for (const graph::InputEntry& e : inputs) sides[e.value] = e.side;
  for (const graph::PackedInput& p : packed) sides[p.user_value] = Side::kRequestOnly;
  sides[index] = Side::kIndex;
  std::string user_source;
  std::map<std::string, std::string> symbol_sources{{candidate_symbol, index + ".size(0)"}};
  for (const graph::UserInput& input : graph::user_inputs(program)) {
    spec.inputs.push_back({input.value, input.name, input.path, sides.at(input.value)});
    const auto& sizes = program.graph.tensors.at(input.value).sizes;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      for (const std::string& s : sizes[d].symbols())
        symbol_sources.emplace(s, fmt::format("{}.size({})", input.name, d));
    }
  }
  const std::map<std::string, Expr> names{{user_symbol, Expr::symbol("B_user")},
                                          {candidate_symbol, Expr::symbol("B_cand")}};
  for (const Node& node : program.graph.nodes) {
    graph::OperatorEntry entry{node.name, node.target, builder.role(node.name), builder.note(node.name), {}};
    for (const std::string& name : graph::output_names(node)) {
      const auto it = program.graph.tensors.find(name);
      if (it == program.graph.tensors.end()) continue;
      graph::ResultEntry r{name, graph::dtype_name(it->second.dtype), {}};
      for (const Expr& e : it->second.sizes) {
        std::set<std::string> sources;
        for (const std::string& s : e.symbols()) {
          const auto known = symbol_sources.find(s);
          sources.insert(known == symbol_sources.end() ? "data" : known->second);
        }
        if (sources.empty()) sources.insert("export");
        r.dims.push_back({e.substitute(names).str(), fmt::format("{}", fmt::join(sources, ", "))});
      }
      entry.results.push_back(std::move(r));
    }
    if (entry.results.empty() && !graph::output_names(node).empty()) continue;  // a size
    Report& report = result.report;
    report.at_user_batch += entry.role == Role::kRequestOnly ? 1 : 0;
    report.at_candidate_batch += entry.role == Role::kCandidate || entry.role == Role::kReplicated ? 1 : 0;
    report.ikbo_operators += entry.role == Role::kIkbo ? 1 : 0;
    report.broadcasts += entry.role == Role::kBroadcast ? 1 : 0;
    spec.operators.push_back(std::move(entry));
  }
  // Broadcasts of values that nothing needed in the end are no stops.
  std::set<std::string> broadcast;
  for (const Node& node : program.graph.nodes) {
    if (builder.role(node.name) == Role::kBroadcast) broadcast.insert(graph::input_names(node)[0]);
  }
  std::erase_if(result.report.stops, [&](const Stop& s) {
    return std::none_of(broadcast.begin(), broadcast.end(),
                        [&](const std::string& v) { return v == s.value || v == s.value + "_reshape"; });
  });
  result.archive.extra_files = {{graph::Specification::kFile, graph::specification_to_json(spec).dump(1)}};
}

}  // namespace ikbo::transform
