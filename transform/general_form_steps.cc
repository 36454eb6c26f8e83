// Models that broadcast inside, in the general form: views, repetitions, lookups by the index, and pointwise operators
// in which a single row meets many.
#include <algorithm>
#include <numeric>

#include "graph/error.h"
#include "transform/general_form.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

namespace {

// What an operator says of dimensions, counted with one more in front.
bool shift_dims(Node& node, const std::string& op) {
  static const std::set<std::string, std::less<>> kFirst{
      "cat",   "concat",           "concatenate", "stack", "slice",
      "split", "split_with_sizes", "chunk",       "unbind"};  // without a dimension they mean the first
  static const std::set<std::string, std::less<>> kLast{"sort", "argsort", "topk"};
  static const std::set<std::string, std::less<>> kGiven{
      "softmax", "_softmax", "log_softmax", "_log_softmax", "sum",       "mean",    "amax",   "amin",        "prod",
      "any",     "all",      "var",         "std",          "logsumexp", "argmax",  "argmin", "max",         "min",
      "cumsum",  "select",   "narrow",      "unsqueeze",    "transpose", "permute", "flip",   "index_select"};
  static const std::set<std::string, std::less<>> kTrailing{"linear",     "embedding", "one_hot",
                                                            "layer_norm", "rms_norm",  "native_layer_norm"};
  if (kTrailing.contains(op)) return true;
  if (!kFirst.contains(op) && !kLast.contains(op) && !kGiven.contains(op)) return false;
  bool given = false;
  for (graph::NamedArgument& a : node.inputs) {
    if (!one_of(a.name, {"dim", "dims", "dim0", "dim1"})) continue;
    if (auto* d = std::get_if<std::int64_t>(&a.value)) {
      if (*d >= 0) ++*d;
    } else if (auto* list = std::get_if<std::vector<std::int64_t>>(&a.value)) {
      if (op == "permute") {
        for (std::int64_t& d : *list) d = d < 0 ? d + static_cast<std::int64_t>(list->size()) : d;
      }
      for (std::int64_t& d : *list) d += d >= 0 ? 1 : 0;
      if (op == "permute") list->insert(list->begin(), 0);
    } else {
      return false;
    }
    given = true;
  }
  if (!given && kFirst.contains(op)) node.inputs.push_back({"dim", std::int64_t{1}, 2});
  return given || !kGiven.contains(op);
}

// A reduction to one number, as one over all dimensions but the first of `rank + 1`.
bool reduce_all(Node& node, int rank) {
  static const std::map<std::string, const char*, std::less<>> kWhole{
      {"torch.ops.aten.sum.default", "torch.ops.aten.sum.dim_IntList"},
      {"torch.ops.aten.mean.default", "torch.ops.aten.mean.dim"},
      {"torch.ops.aten.max.default", "torch.ops.aten.amax.default"},
      {"torch.ops.aten.min.default", "torch.ops.aten.amin.default"}};
  const auto found = kWhole.find(node.target);
  if (found == kWhole.end() || rank == 0) return false;
  std::vector<std::int64_t> dims(static_cast<std::size_t>(rank));
  std::iota(dims.begin(), dims.end(), 1);
  node.target = found->second;
  node.inputs.insert(node.inputs.begin() + 1, {"dim", dims, 1});
  return true;
}

}  // namespace

Expr GeneralForm::product_of(const std::vector<Expr>& sizes, std::size_t end) {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(end), Expr(1),
                         [](const Expr& a, const Expr& b) { return a * b; });
}

// ---- Steps --------------------------------------------------------------------------------------------------------

// x[index] of request-only rows: the lifted value has a row for every candidate already.
bool GeneralForm::lookup(const Node& node) {
  const std::string op = aten_name(node.target);
  const std::map<std::string, Batch> none;
  const RuleInput in(before_, node, given_.batch, none);
  const std::string* self = in.tensor(op == "embedding" ? "weight" : "self");
  std::optional<int> at;
  std::optional<std::string> index;
  if (op == "embedding" && in.tensor("indices") != nullptr) {
    at = 0;
    index = *in.tensor("indices");
  } else if (op == "index_select" && self != nullptr && in.tensor("index") != nullptr) {
    at = in.dim("dim", in.rank(*self));
    index = *in.tensor("index");
  } else if (op == "index") {
    const auto* argument = node.find("indices");
    const auto* list = argument != nullptr ? std::get_if<graph::OptionalTensorListArg>(argument) : nullptr;
    std::vector<std::optional<std::string>> names;
    if (list != nullptr) {
      names = list->names;
    } else if (argument != nullptr) {
      for (const std::string& name : graph::value_names(*argument)) names.emplace_back(name);
    }
    if (std::count_if(names.begin(), names.end(), [](const auto& n) { return n.has_value(); }) != 1) return false;
    const auto found = std::find_if(names.begin(), names.end(), [](const auto& n) { return n.has_value(); });
    at = static_cast<int>(found - names.begin());
    index = *found;
  }
  if (self == nullptr || !at || !index || !index_values_.contains(*index) || !has_rows(*self)) return false;
  const Expr& size = before_.tensors.at(*self).sizes[static_cast<std::size_t>(*at)];
  const auto symbols = size.symbols();
  const bool of_users = symbols.size() == 1 && given_.user_symbols.contains(*symbols.begin());
  if (!of_users || !(size == Expr::symbol(*symbols.begin())) || !(batches_.at(made(*self)) == Batch{*at, 1}))
    return false;
  bind(graph::output_names(node)[0], made(*self), {*at, 1});
  return true;
}

bool GeneralForm::view(const Node& node) {
  const std::string op = aten_name(node.target);
  const auto operands = tensors_of(node);
  const auto results = graph::output_names(node);
  if (operands.size() != 1 || results.size() != 1 || !has_rows(operands[0]) || node.find("dtype") != nullptr)
    return false;
  const std::string& self = operands[0];
  const Batch batch = batches_.at(made(self));
  const auto& own = old_sizes(results[0]);
  const std::map<std::string, Batch> none;
  const RuleInput in(before_, node, given_.batch, none);
  const int rank = in.rank(self);
  const bool single = is_single(self);
  if (op == "squeeze" && !single) {
    // Without dimensions it would drop a batch of one row; what the sizes show it to drop is 1 for certain.
    const auto shown = shown_batch(results[0]);
    if (node.find("dim") != nullptr || !shown) return false;
    const Expr before = product_of(sizes(made(self)), static_cast<std::size_t>(batch.axis));
    if (!(before == product_of(own, static_cast<std::size_t>(shown->axis))) || !(shown->inner == batch.inner))
      return false;
    bind(results[0], reshape(made(self), own, *shown), *shown);
    return true;
  }
  if (!single) return false;
  bool views =
      one_of(op, {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "_reshape_copy", "squeeze"});
  if (op == "select") {  // the only row
    const auto d = in.dim("dim", rank);
    const auto index = in.integer("index");
    views = d == batch.axis && batch.inner.is_integer(1) && (index == 0 || index == -1);
  } else if (op == "unsqueeze") {
    const auto d = in.dim("dim", rank + 1);
    views = d && *d <= batch.axis;
  }
  if (!views) return false;
  if (own.empty()) {  // one number of the request
    bind(results[0], reshape(made(self), {rows()}, {0, 1}), {0, 1});
    return true;
  }
  const Expr before = product_of(sizes(made(self)), static_cast<std::size_t>(batch.axis));
  for (std::size_t axis = 0; axis < own.size(); ++axis) {
    if (!(product_of(own, axis) == before)) continue;
    std::vector<Expr> lifted = own;
    lifted[axis] = rows() * own[axis];
    const Batch moved{static_cast<int>(axis), own[axis]};
    bind(results[0], reshape(made(self), lifted, moved), moved);
    return true;
  }
  std::vector<Expr> whole = own;
  whole.insert(whole.begin(), rows());
  bind(results[0], unstack(reshape(stack(self), whole, {0, 1}), 0), {0, own[0]});
  return true;
}

// expand, repeat, tile, repeat_interleave of a single value: to the batch, which the lifted value has already, or to
// more entries of one row.
bool GeneralForm::repeat(const Node& node) {
  const std::string op = aten_name(node.target);
  const bool expands = one_of(op, {"expand", "expand_as", "broadcast_to"});
  if (!expands && !one_of(op, {"repeat", "tile", "repeat_interleave"})) return false;
  const std::map<std::string, Batch> none;
  const RuleInput in(before_, node, given_.batch, none);
  const std::string* self = in.tensor("self");
  const auto results = graph::output_names(node);
  if (self == nullptr || results.size() != 1 || !has_rows(*self) || !is_single(*self)) return false;
  const auto& after = old_sizes(results[0]);
  std::vector<Expr> before = old_sizes(*self);
  if (after.size() < before.size() || (op == "repeat_interleave" && after.size() != before.size())) return false;
  const bool number = before.empty();
  const auto shift = static_cast<int>(after.size() - before.size());
  before.insert(before.begin(), static_cast<std::size_t>(shift), Expr(1));
  const auto shown = shown_batch(results[0]);
  const bool on_batch =
      std::any_of(after.begin(), after.end(), [&](const Expr& e) { return e.depends_on(given_.batch); });
  if (on_batch && !shown) return false;
  const int axis = shown ? shown->axis : 0;
  std::vector<Expr> one_row = after;  // the result without its rows
  if (shown) {
    const auto at = static_cast<std::size_t>(axis);
    one_row[at] = before[at];
    if (!(shown->inner == before[at])) return false;  // several rows a candidate
    if (!before[at].is_integer(1) && op != "repeat" && op != "tile") return false;
  }
  const Batch batch = batches_.at(made(*self));
  const int own = batch.axis + shift;
  const bool in_place = number  ? false
                        : shown ? shown->axis == own
                                : after[static_cast<std::size_t>(own)] == batch.inner;
  if (expands && in_place) {  // the rows stay where they are
    std::vector<Expr> lifted = after;
    lifted[static_cast<std::size_t>(own)] = rows() * batch.inner;
    bind(results[0], expand(made(*self), lifted, {own, batch.inner}), {own, batch.inner});
    return true;
  }
  std::string value = padded(stack(*self), after.size() + 1);
  one_row.insert(one_row.begin(), rows());
  if (op == "repeat_interleave") {
    if (!shown || !(sizes(value) == one_row)) return false;
  } else if (expands) {
    value = expand(value, one_row, {0, 1});
  } else if (!(sizes(value) == one_row)) {
    std::vector<std::int64_t> times{1};
    for (std::size_t d = 1; d < one_row.size(); ++d) {
      const auto quotient = one_row[d].exact_quotient(sizes(value)[d]);
      if (!quotient || !quotient->as_integer()) return false;
      times.push_back(*quotient->as_integer());
    }
    value = emit("torch.ops.aten.repeat.default", {{"self", TensorArg{value}, 1}, {"repeats", times, 1}}, one_row,
                 value, {0, 1});
  }
  bind(results[0], unstack(value, axis), {axis, one_row[static_cast<std::size_t>(axis) + 1]});
  return true;
}

// A pointwise operator over single values and candidates' values: each single one gets its rows where the result has
// them.
bool GeneralForm::meet(const Node& node, std::string& why) {
  const auto results = graph::output_names(node);
  if (!is_pointwise(node.target) || results.size() != 1) return false;
  bool any_single = false;
  bool any_other = false;
  for (const std::string& name : tensors_of(node)) {
    if (has_rows(name)) (is_single(name) ? any_single : any_other) = true;
  }
  const auto shown = shown_batch(results[0]);
  if (!any_single || !any_other || !shown) return false;
  const std::size_t rank = old_sizes(results[0]).size();
  const auto axis = static_cast<std::size_t>(shown->axis);
  std::map<std::string, std::string> replaced;
  for (const std::string& name : tensors_of(node)) {
    if (!has_rows(name) || !is_single(name)) continue;
    const Batch own = batches_.at(made(name));
    const auto shift = rank - sizes(made(name)).size();
    if (own.axis + static_cast<int>(shift) == shown->axis && own.inner == shown->inner) continue;
    std::string value = padded(stack(name), rank + 1);  // [B, ..., 1 at the axis, ...]
    std::vector<Expr> full = sizes(value);
    if (!full[axis + 1].is_integer(1)) {
      why = "it takes the entries of one request-only row for rows of candidates";
      return false;
    }
    full[axis + 1] = shown->inner;
    replaced[name] = unstack(expand(value, full, {0, 1}), shown->axis);
  }
  if (replaced.empty()) return false;
  const std::map<std::string, std::string> before = made_;
  for (const auto& [name, value] : replaced) made_[name] = value;
  const bool fits = direct(node, why);
  made_ = before;
  return fits;
}

// Operators over single values whose entries stand where rows would: with the rows in front of all dimensions.
bool GeneralForm::stacked(const Node& node, std::string& why) {
  const std::string op = aten_name(node.target);
  for (const std::string& name : tensors_of(node)) {
    if (has_rows(name) && !is_single(name)) return false;
  }
  const auto results = graph::output_names(node);
  const bool pointwise = is_pointwise(node.target);
  for (const std::string& name : results) {
    if (!is_tensor(name)) return false;
  }
  std::map<std::string, std::string> kept;
  std::map<std::string, Batch> batched;
  const std::map<std::string, std::string> before = made_;
  for (const std::string& name : tensors_of(node)) {
    if (!has_rows(name)) continue;
    const std::string value = pointwise ? padded(stack(name), old_sizes(results[0]).size() + 1) : stack(name);
    kept[name] = value;
    batched[value] = {0, 1};
  }
  if (kept.empty()) return false;
  for (const auto& [name, value] : kept) made_[name] = value;
  Node copy = translated(node);
  made_ = before;
  const auto rank = old_sizes(tensors_of(node)[0]).size();
  if (!pointwise && !reduce_all(copy, static_cast<int>(rank)) && !shift_dims(copy, op)) return false;
  std::map<std::string, std::string> renamed;
  for (const std::string& name : results) {
    graph::TensorMeta meta = graph_.tensors.at(name);
    meta.sizes.insert(meta.sizes.begin(), rows());
    meta.strides = graph::contiguous_strides(meta.sizes);
    meta.storage_offset = 0;
    renamed[name] = names_.fresh(name + "_rows");
    graph_.tensors.emplace(renamed[name], std::move(meta));
  }
  for (Argument& out : copy.outputs) {
    if (auto* t = std::get_if<TensorArg>(&out)) t->name = renamed.at(t->name);
    if (auto* list = std::get_if<graph::TensorListArg>(&out)) {
      for (std::string& name : list->names) name = renamed.at(name);
    }
  }
  copy.name = renamed.at(results[0]);
  const RuleResult rows_of = apply_rule(RuleInput(graph_, copy, given_.batch, batched), why);
  if (!rows_of) return false;
  for (const auto& batch : *rows_of) {
    if (!(batch == Batch{0, 1})) return false;
  }
  graph_.nodes.push_back(std::move(copy));
  for (const std::string& name : results) {
    batches_[renamed.at(name)] = {0, 1};
    bind_stacked(name, renamed.at(name));
  }
  return true;
}

void GeneralForm::bind_stacked(const std::string& name, const std::string& stacked) {
  if (old_sizes(name).empty()) {
    bind(name, stacked, {0, 1});
  } else {
    bind(name, unstack(stacked, 0), {0, old_sizes(name)[0]});
  }
}

// ---- Values -------------------------------------------------------------------------------------------------------

std::string GeneralForm::stack(const std::string& name) {
  if (const auto it = stacks_.find(name); it != stacks_.end()) return it->second;
  const std::string& value = made(name);
  if (old_sizes(name).empty()) return stacks_[name] = value;  // one number a row already
  const Batch batch = batches_.at(value);
  const auto axis = static_cast<std::size_t>(batch.axis);
  std::vector<Expr> rest = sizes(value);
  rest[axis] = batch.inner;
  std::vector<Expr> front = rest;
  front.insert(front.begin(), rows());
  if (product_of(rest, axis).is_integer(1)) return stacks_[name] = reshape(value, front, {0, 1});
  std::vector<Expr> split = rest;
  split.insert(split.begin() + batch.axis, rows());
  std::vector<std::int64_t> dims(split.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::rotate(dims.begin(), dims.begin() + batch.axis, dims.begin() + batch.axis + 1);
  return stacks_[name] = permute(reshape(value, split, {batch.axis, 1}), dims, {0, 1});
}

std::string GeneralForm::unstack(const std::string& value, int axis) {
  std::vector<Expr> rest(sizes(value).begin() + 1, sizes(value).end());
  const auto at = static_cast<std::size_t>(axis);
  const Batch batch{axis, rest[at]};
  std::vector<Expr> merged = rest;
  merged[at] = rows() * rest[at];
  if (product_of(rest, at).is_integer(1)) return reshape(value, merged, batch);
  std::vector<std::int64_t> dims(rest.size() + 1);
  std::iota(dims.begin(), dims.end(), 0);
  std::rotate(dims.begin(), dims.begin() + 1, dims.begin() + 1 + axis);
  return reshape(permute(value, dims, {axis, 1}), merged, batch);
}

std::string GeneralForm::padded(const std::string& stacked, std::size_t rank) {
  std::vector<Expr> full = sizes(stacked);
  full.insert(full.begin() + 1, rank - full.size(), Expr(1));
  return reshape(stacked, full, {0, 1});
}

void GeneralForm::bind(const std::string& name, const std::string& value, const Batch& batch) {
  made_[name] = value;
  if (!(batches_.at(value) == batch)) fail("internal error: '{}' has its rows elsewhere", name);
}

// ---- Nodes --------------------------------------------------------------------------------------------------------

std::string GeneralForm::emit(const std::string& target, std::vector<graph::NamedArgument> inputs,
                              std::vector<Expr> wanted, const std::string& like, const Batch& batch) {
  Node node = new_node(graph_, names_, target, std::move(inputs), std::move(wanted), like);
  std::string why;
  const RuleResult found = apply_rule(RuleInput(graph_, node, given_.batch, batches_), why);
  if (!found || !((*found)[0] == batch)) fail("internal error: '{}' ({}): {}", node.name, target, why);
  batches_[node.name] = batch;
  graph_.nodes.push_back(std::move(node));
  return graph_.nodes.back().name;
}

// A view of a view is one of what the first one shows.
std::string GeneralForm::reshape(const std::string& value, const std::vector<Expr>& wanted, const Batch& batch) {
  const auto it = viewed_.find(value);
  const std::string source = it == viewed_.end() ? value : it->second;
  if (sizes(source) == wanted && batches_.at(source) == batch) return source;
  const std::string made =
      emit("torch.ops.aten.reshape.default", {{"self", TensorArg{source}, 1}, {"shape", size_argument(wanted), 1}},
           wanted, source, batch);
  viewed_[made] = source;
  return made;
}

std::string GeneralForm::expand(const std::string& value, const std::vector<Expr>& wanted, const Batch& batch) {
  if (sizes(value) == wanted) return value;
  return emit("torch.ops.aten.expand.default", {{"self", TensorArg{value}, 1}, {"size", size_argument(wanted), 1}},
              wanted, value, batch);
}

std::string GeneralForm::permute(const std::string& value, const std::vector<std::int64_t>& dims, const Batch& batch) {
  std::vector<Expr> wanted;
  for (const std::int64_t d : dims) wanted.push_back(sizes(value)[static_cast<std::size_t>(d)]);
  return emit("torch.ops.aten.permute.default", {{"self", TensorArg{value}, 1}, {"dims", dims, 1}}, wanted, value,
              batch);
}

Argument GeneralForm::size_argument(const std::vector<Expr>& wanted) {
  graph::SymIntListArg list;
  std::vector<std::int64_t> integers;
  for (const Expr& e : wanted) {
    if (const auto value = e.as_integer()) {
      integers.push_back(*value);
      list.values.push_back({*value});
      continue;
    }
    auto [it, inserted] = size_values_.try_emplace(e.srepr());
    if (inserted) {
      it->second = names_.fresh("size");
      graph_.sym_ints.emplace(it->second, e);
    }
    list.values.push_back({it->second});
  }
  if (integers.size() == wanted.size()) return integers;
  return list;
}

}  // namespace ikbo::transform
