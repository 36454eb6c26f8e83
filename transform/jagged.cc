// Embedding bags of many lengths, given as values and offsets: which inputs they are, and how they move to the users.
#include "transform/jagged.h"

#include <algorithm>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

namespace {

constexpr const char* kRemedy =
    "Give every feature's values and offsets as inputs of their own, values with a dynamic size of their own, offsets "
    "with `batch` entries, or `batch + 1` where include_last_offset; or pad the bags to a matrix (batch, length), and "
    "with padding_idx the padding is left out of sums and means";

std::string symbol_of(const Expr& size) {
  const auto symbols = size.symbols();
  return symbols.size() == 1 && size == Expr::symbol(*symbols.begin()) ? *symbols.begin() : std::string();
}

// The symbol of an input's first dimension; empty where that dimension is fixed.
std::string leading_symbol(const graph::Graph& graph, const graph::UserInput& input) {
  const auto meta = graph.tensors.find(input.value);
  return meta == graph.tensors.end() || meta->second.sizes.empty() ? std::string() : symbol_of(meta->second.sizes[0]);
}

bool includes_last_offset(const Node& bag) {
  return boolean_argument(bag, "include_last_offset") == true;
}

}  // namespace

bool is_bag(const Node& node) {
  return one_of(aten_name(node.target), {"embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"});
}

bool keeps_integers(const graph::Graph& graph, const Node& node) {
  const auto results = graph::output_names(node);
  const auto operands = graph::input_names(node);
  if (results.size() != 1 || operands.empty() || !graph.tensors.contains(operands[0])) return false;
  const auto& before = graph.tensors.at(operands[0]);
  const auto& after = graph.tensors.at(results[0]);
  const std::string op = aten_name(node.target);
  return graph::is_integral(after.dtype) && graph::dtype_bytes(after.dtype) >= 4 && before.sizes.size() == 1 &&
         after.sizes == before.sizes && node.target != "torch.ops.aten.view.dtype" &&
         (keeps_order(op) || one_of(op, {"to", "_to_copy", "long", "int"}));
}

bool keeps_offsets(const graph::Graph& graph, const Node& node) {
  if (node.target != "torch.ops.aten.slice.Tensor") return keeps_integers(graph, node);
  const auto& before = graph.tensors.at(graph::input_names(node)[0]).sizes;
  const auto& after = graph.tensors.at(graph::output_names(node)[0]).sizes;
  return before.size() == 1 && after == std::vector<Expr>{before[0] - 1} &&
         integer_argument(node, "dim").value_or(0) == 0 && integer_argument(node, "start").value_or(0) == 0 &&
         integer_argument(node, "end") == -1 && integer_argument(node, "step").value_or(1) == 1;
}

std::vector<JaggedBags> find_jagged(const graph::Program& program, const std::vector<graph::UserInput>& inputs) {
  const graph::Graph& graph = program.graph;
  std::map<std::string, const Node*> makers;
  for (const Node& node : graph.nodes) {
    for (const std::string& name : graph::output_names(node)) makers[name] = &node;
  }
  std::vector<JaggedBags> found;
  for (const Node& node : graph.nodes) {
    const std::string* indices = is_bag(node) ? tensor_argument(node, "indices") : nullptr;
    const std::string* offsets = is_bag(node) ? tensor_argument(node, "offsets") : nullptr;
    if (indices == nullptr || offsets == nullptr || graph.tensors.at(*indices).sizes.size() != 1) continue;
    JaggedBags bags;
    const std::string total = symbol_of(graph.tensors.at(*indices).sizes[0]);
    const Expr rows = graph.tensors.at(graph::output_names(node)[0]).sizes[0];
    if (total.empty() || rows == Expr::symbol(total)) continue;  // values with rows, as many as bags
    bags.totals.insert(total);
    std::string root = *offsets;
    while (makers.contains(root) && keeps_offsets(graph, *makers.at(root))) {
      root = graph::input_names(*makers.at(root))[0];
    }
    for (const graph::UserInput& input : inputs) {
      if (leading_symbol(graph, input) == total) bags.input.values.push_back(input.value);
    }
    if (bags.input.values.empty()) continue;  // as many as data says
    bags.input.offsets = root;
    const bool given = std::any_of(inputs.begin(), inputs.end(), [&](const auto& i) { return i.value == root; });
    bags.batch = symbol_of(rows);
    const Expr entries = graph.tensors.at(root).sizes[0];
    bags.input.includes_end = entries == rows + 1;
    const auto refuse = [&](const std::string& why) {
      fail("node '{}' ({}) reads bags of many lengths (values and offsets), and {}. {}", node.name, node.target, why,
           kRemedy);
    };
    if (!given) refuse(fmt::format("its offsets '{}' are computed in the model", *offsets));
    if (bags.batch.empty() || !(entries == rows || entries == rows + 1)) {
      refuse(fmt::format("its offsets '{}' have {} entries", root, entries.str()));
    }
    const auto same_values = [&](const JaggedBags& other) { return other.totals.contains(total); };
    const auto same_offsets = [&](const JaggedBags& other) { return other.input.offsets == root; };
    const auto known = std::find_if(found.begin(), found.end(), same_values);
    if (known != found.end() && known->input.offsets != root) {
      refuse(fmt::format("its values '{}' are bags of '{}' and of '{}', while a request gives their lengths once",
                         bags.input.values[0], known->input.offsets, root));
    }
    if (known != found.end()) continue;
    if (const auto other = std::find_if(found.begin(), found.end(), same_offsets); other != found.end()) {
      other->totals.insert(total);
      auto& values = other->input.values;
      values.insert(values.end(), bags.input.values.begin(), bags.input.values.end());
    } else {
      found.push_back(std::move(bags));
    }
  }
  return found;
}

UnreadBags find_unread_bags(const graph::Program& program, const std::vector<graph::UserInput>& inputs) {
  const graph::Graph& graph = program.graph;
  std::set<std::string> read;
  const auto see = [&](const std::vector<std::string>& names) { read.insert(names.begin(), names.end()); };
  for (const Node& node : graph.nodes) see(graph::input_names(node));
  for (const Argument& a : graph.outputs) see(graph::value_names(a));
  std::map<std::string, int> shown;  // symbols of first dimensions, and of how many inputs
  for (const graph::UserInput& input : inputs) ++shown[leading_symbol(graph, input)];
  UnreadBags unread;
  std::set<std::string> own;
  for (const graph::UserInput& input : inputs) {
    const auto meta = graph.tensors.find(input.value);
    if (read.contains(input.value) || meta == graph.tensors.end() || meta->second.sizes.size() != 1) continue;
    const Expr& size = meta->second.sizes[0];
    const std::string batch = symbol_of(size - 1);
    if (!batch.empty() && shown.contains(batch) && graph::is_integral(meta->second.dtype)) {
      unread.offsets.push_back({{{}, input.value, /*includes_end=*/true}, {}, batch});
    } else if (const std::string total = symbol_of(size); !total.empty() && shown.at(total) == 1) {
      unread.values.insert(input.value);
    }
  }
  if (unread.offsets.empty()) unread.values.clear();
  return unread;
}

// ---- Rewriter ----

void Rewriter::bind_bags(const JaggedBags& bags) {
  totals_.insert(bags.totals.begin(), bags.totals.end());
  bag_offsets_[bags.input.offsets] = bags.totals;
  for (const std::string& name : bags.input.values)
    values_[name] = {Level::kJagged, Batch{0, 1}, name, {}, nullptr, {}};
  values_[bags.input.offsets] = {Level::kJagged, {}, bags.input.offsets, {}, nullptr, {}};
}

// Symbols of values that moved to the users, among those that an argument or a result's size is written with.
bool Rewriter::concerns_bags(const Node& node) const {
  if (totals_.empty()) return false;
  const auto depends = [&](const Expr& e) {
    return std::any_of(totals_.begin(), totals_.end(), [&](const auto& total) { return e.depends_on(total); });
  };
  const auto mentions = [&](const graph::Json& table, const std::string& name) {
    return table.contains(name) && std::any_of(totals_.begin(), totals_.end(), [&](const auto& total) {
             return is_written_with(table.at(name), total);
           });
  };
  for (const std::string& name : graph::input_names(node)) {
    const auto value = values_.find(name);
    if (value != values_.end() && value->second.level == Level::kJagged) return true;
    const auto number = original_.sym_ints.find(name);
    if (number != original_.sym_ints.end() && depends(number->second)) return true;
    if (mentions(original_.sym_floats, name) || mentions(original_.sym_bools, name)) return true;
  }
  for (const std::string& name : graph::output_names(node)) {
    if (!is_tensor(name)) continue;
    const auto& sizes = original_.tensors.at(name).sizes;
    if (std::any_of(sizes.begin(), sizes.end(), depends)) return true;
  }
  return false;
}

void Rewriter::visit_bags(const Node& node) {
  if (try_bag(node) || try_bag_offsets(node) || try_bag_values(node)) return;
  fail(
      "node '{}' ({}) works on request-only values or offsets of bags of many lengths otherwise than entry by entry or "
      "as the bags of an embedding_bag, whose table and weights are not the candidates'. {}",
      node.name, node.target, kRemedy);
}

// The symbol of the values that a value has an entry for each of, in its first dimension.
std::string Rewriter::total_of(const std::string& name) const {
  const auto value = values_.find(name);
  if (value == values_.end() || value->second.level != Level::kJagged || value->second.batch != Batch{0, 1}) return {};
  return symbol_of(original_.tensors.at(name).sizes[0]);
}

bool Rewriter::try_bag(const Node& node) {
  const std::string* weight = is_bag(node) ? tensor_argument(node, "weight") : nullptr;
  const std::string* indices = is_bag(node) ? tensor_argument(node, "indices") : nullptr;
  const std::string* offsets = is_bag(node) ? tensor_argument(node, "offsets") : nullptr;
  if (weight == nullptr || indices == nullptr || offsets == nullptr) return false;
  const std::string total = total_of(*indices);
  const auto own = bag_offsets_.find(*offsets);
  const auto table = values_.find(*weight);
  if (total.empty() || own == bag_offsets_.end() || !own->second.contains(total)) return false;
  if (table == values_.end() || table->second.level != Level::kShared) return false;
  const std::string* factors = tensor_argument(node, "per_sample_weights");
  if (factors != nullptr && total_of(*factors) != total) return false;
  const auto results = graph::output_names(node);
  const Expr rows = original_.tensors.at(results[0]).sizes[0];
  const Expr entries = includes_last_offset(node) ? rows + 1 : rows;
  if (rows != Expr::symbol(builder_.candidate_symbol()) || original_.tensors.at(*offsets).sizes[0] != entries) {
    return false;
  }
  for (const std::string& name : results) values_[name] = {Level::kJagged, {}, {}, {}, &node, {}};
  values_[results[0]] = {Level::kUser, Batch{0, 1}, {}, {}, &node, {}};
  clone(node, Where::kUser, graph::Role::kRequestOnly);
  builder_.anchor(builder_.user_symbol(), values_.at(results[0]).at_user, 0);
  return true;
}

bool Rewriter::try_bag_offsets(const Node& node) {
  if (!keeps_offsets(original_, node)) return false;
  const auto own = bag_offsets_.find(graph::input_names(node)[0]);
  if (own == bag_offsets_.end()) return false;
  const std::string result = graph::output_names(node)[0];
  values_[result] = {Level::kJagged, {}, {}, {}, &node, {}};
  bag_offsets_[result] = own->second;
  clone(node, Where::kUser, graph::Role::kRequestOnly);
  return true;
}

// Each entry on its own: the rules say so, asked about the values instead of the batch.
bool Rewriter::try_bag_values(const Node& node) {
  const auto results = graph::output_names(node);
  std::string total;
  std::map<std::string, Batch> batched;
  const auto see = [&](const std::string& symbol) {
    if (total.empty()) total = symbol;
    return total == symbol;
  };
  for (const std::string& name : graph::input_names(node)) {
    const auto value = values_.find(name);
    if (value == values_.end() || value->second.level == Level::kShared) continue;
    const std::string own = total_of(name);
    if (own.empty() || !see(own)) return false;
    batched.emplace(name, Batch{0, 1});
  }
  for (const std::string& name : results) {
    if (!is_tensor(name)) return false;
    const auto& sizes = original_.tensors.at(name).sizes;
    const std::string own = sizes.empty() ? std::string() : symbol_of(sizes[0]);
    if (!totals_.contains(own) || !see(own)) return false;
    for (const Expr& e : sizes) {
      if (e.depends_on(builder_.candidate_symbol())) return false;
    }
  }
  const Rule* rule = find_rule(node.target);
  if (rule == nullptr || is_random(node)) return false;
  for (const std::string& name : graph::input_names(node)) {
    if (is_tensor(name)) continue;
    const auto number = original_.sym_ints.find(name);
    if (number == original_.sym_ints.end() || number->second.depends_on(builder_.candidate_symbol())) return false;
    if (!builder_.computable(number->second)) return false;
    if (number->second.depends_on(total) && !rule->sizes_follow) return false;
  }
  std::string why;
  const RuleResult rows = apply_rule(RuleInput(original_, node, total, batched), why);
  if (!rows) return false;
  for (const auto& batch : *rows) {
    if (!batch || *batch != Batch{0, 1}) return false;
  }
  for (const std::string& name : results) values_[name] = {Level::kJagged, Batch{0, 1}, {}, {}, &node, {}};
  clone(node, Where::kUser, graph::Role::kRequestOnly);
  return true;
}

}  // namespace ikbo::transform
