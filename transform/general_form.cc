// Models that broadcast inside, in the general form: the walk over the graph, and operators that are applied as they
// are.
#include "transform/general_form.h"

#include <algorithm>

#include "graph/error.h"
#include "transform/jagged.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::TensorArg;

GeneralForm::GeneralForm(const graph::Graph& before, InnerBroadcast given)
    : before_(before), given_(std::move(given)), graph_(before), names_(before) {
  std::map<std::string, Expr> unify;
  for (const std::string& symbol : given_.user_symbols) unify.emplace(symbol, rows());
  for (auto& [name, meta] : graph_.tensors) {
    for (Expr& e : meta.sizes) e = e.substitute(unify);
    for (Expr& e : meta.strides) e = e.substitute(unify);
    meta.storage_offset = meta.storage_offset.substitute(unify);
    substituted_[name] = meta.sizes;
  }
  for (auto& [name, e] : graph_.sym_ints) e = e.substitute(unify);
  graph_.nodes.clear();
}

graph::Graph GeneralForm::run() {
  for (const std::string& name : given_.single) {
    graph::TensorMeta& meta = graph_.tensors.at(name);
    meta.sizes[0] = rows();
    batches_[name] = {0, 1};
  }
  for (const std::string& name : given_.batched) batches_[name] = {0, 1};
  if (!given_.index.empty()) index_values_.insert(given_.index);
  for (const Node& node : before_.nodes) visit(node);
  check_outputs();
  for (Argument& out : graph_.outputs) {
    if (auto* t = std::get_if<TensorArg>(&out)) t->name = made(t->name);
  }
  return std::move(graph_);
}

const std::string& GeneralForm::made(const std::string& name) const {
  const auto it = made_.find(name);
  return it == made_.end() ? name : it->second;
}

bool GeneralForm::is_single(const std::string& name) const {
  const auto it = batches_.find(made(name));
  return it != batches_.end() && !shown_batch(name);
}

std::optional<Batch> GeneralForm::shown_batch(const std::string& name) const {
  std::optional<Batch> batch;
  const auto& own = old_sizes(name);
  for (std::size_t d = 0; d < own.size(); ++d) {
    if (!own[d].depends_on(given_.batch)) continue;
    const auto inner = own[d].multiple_of(given_.batch);
    if (batch || !inner) return std::nullopt;
    batch = Batch{static_cast<int>(d), *inner};
  }
  return batch;
}

std::vector<std::string> GeneralForm::tensors_of(const Node& node) const {
  std::vector<std::string> names = graph::input_names(node);
  std::erase_if(names, [&](const std::string& n) { return !is_tensor(n); });
  return names;
}

void GeneralForm::refuse(const Node& node, const std::string& why) const {
  fail(
      "node '{}' ({}): {}. The model spreads request-only rows over its candidates by itself ({}), so that every "
      "operator "
      "must treat rows alone. Expand the request-only input to the batch before this operator, or export the model "
      "with "
      "one dynamic batch in the first dimension of every batched input",
      node.name, node.target, why, given_.index.empty() ? "an input has a batch of 1" : "it looks them up by an index");
}

void GeneralForm::check_outputs() const {
  for (const Argument& out : before_.outputs) {
    for (const std::string& name : graph::value_names(out)) {
      if (!is_tensor(name)) continue;
      if (index_values_.contains(name)) fail("the index '{}' is an output, which the transform does not support", name);
      if (!has_rows(name)) continue;
      const auto shown = shown_batch(name);
      const auto& own = before_.tensors.at(name).sizes;
      const bool of_users = std::any_of(own.begin(), own.end(), [&](const Expr& e) {
        const auto symbols = e.symbols();
        return std::any_of(symbols.begin(), symbols.end(),
                           [&](const auto& s) { return given_.user_symbols.contains(s); });
      });
      if (!of_users && shown && shown->inner.is_integer(1) && batches_.at(made(name)) == *shown) continue;
      fail(
          "output '{}' has the sizes of {} where one row a candidate is expected: a model that spreads request-only "
          "rows "
          "over its candidates by itself must give one row a candidate in every output",
          name, graph::describe(before_.tensors.at(name)));
    }
  }
}

// Only sizes may follow the batch. The number of rows as a number is that of one request in the original.
void GeneralForm::check_numbers(const Node& node) const {
  const Rule* rule = find_rule(node.target);
  for (const std::string& name : graph::input_names(node)) {
    if (is_tensor(name)) continue;
    const auto it = graph_.sym_ints.find(name);
    if (it == graph_.sym_ints.end()) refuse(node, "a number that it is given is computed in the graph");
    if (!it->second.depends_on(given_.batch)) continue;
    const bool repeats = aten_name(node.target) == "repeat_interleave";
    if (!repeats && (rule == nullptr || !rule->sizes_follow)) {
      refuse(node, "a number that it is given depends on the batch size");
    }
  }
}

void GeneralForm::visit(const Node& node) {
  const auto results = graph::output_names(node);
  const bool makes_tensor = std::any_of(results.begin(), results.end(), [&](const auto& n) { return is_tensor(n); });
  if (!makes_tensor) {
    if (!results.empty()) graph_.nodes.push_back(translated(node));  // sizes; checks speak of the example's
    return;
  }
  if (follows_index(node)) return;
  if (is_random(node)) refuse(node, "it draws random numbers, which candidates of other requests would change");
  check_numbers(node);

  const auto operands = tensors_of(node);
  const bool any_rows = std::any_of(operands.begin(), operands.end(), [&](const auto& n) { return has_rows(n); });
  const bool shows = std::any_of(results.begin(), results.end(), [&](const std::string& n) {
    const auto& own = old_sizes(n);
    return std::any_of(own.begin(), own.end(), [&](const Expr& e) { return e.depends_on(given_.batch); });
  });
  if (!any_rows && !shows) {
    graph_.nodes.push_back(translated(node));
    return;
  }
  std::string why = "no rule says that its rows are independent";
  if (view(node) || repeat(node) || meet(node, why) || direct(node, why)) return;
  if (product(node, why) || einsum(node, why) || stacked(node, why)) return;
  refuse(node, why);
}

// The index itself, seen through operators that keep its numbers, and what looks up rows by it.
bool GeneralForm::follows_index(const Node& node) {
  const auto operands = tensors_of(node);
  const bool reads =
      std::any_of(operands.begin(), operands.end(), [&](const auto& n) { return index_values_.contains(n); });
  if (!reads) return false;
  if (operands.size() == 1 && keeps_integers(graph_, node)) {
    index_values_.insert(graph::output_names(node)[0]);
    return true;
  }
  if (!lookup(node)) {
    refuse(
        node,
        "it reads the index otherwise than to look up request-only rows by it: x[index], index_select(x, 0, index) or "
        "embedding(index, x)");
  }
  return true;
}

bool GeneralForm::direct(const Node& node, std::string& why) {
  const Rule* rule = find_rule(node.target);
  if (rule == nullptr) return false;
  bool any_single = false;
  bool any_other = false;
  std::map<std::string, Batch> batched;
  for (const std::string& name : tensors_of(node)) {
    if (!has_rows(name)) continue;
    (is_single(name) ? any_single : any_other) = true;
    batched.emplace(made(name), batches_.at(made(name)));
    if (old_sizes(name).empty() && !is_pointwise(node.target)) return false;  // rows of numbers are no vector
  }
  if (any_single && any_other) {  // one row against many must mean that row for each: only broadcasting does
    const bool broadcasts = is_pointwise(node.target) ||
                            one_of(aten_name(node.target), {"matmul", "expand_as", "scaled_dot_product_attention"});
    if (!broadcasts) {
      why = "it takes a request-only value of one row together with candidates' rows";
      return false;
    }
  }
  Node copy = translated(node);
  const RuleInput input(graph_, copy, given_.batch, batched);
  const RuleResult found = rule->rows(input);
  const auto results = input.results();
  if (!found || found->size() != results.size()) {
    why = "its rows are not independent as it is called here";
    return false;
  }
  std::vector<std::vector<Expr>> lifted;
  for (std::size_t i = 0; i < results.size(); ++i) {
    std::vector<Expr> own = old_sizes(results[i]);
    if (const auto& batch = (*found)[i]) {
      if (batch->axis >= static_cast<int>(own.size())) return false;
      Expr& size = own[static_cast<std::size_t>(batch->axis)];
      if (!size.depends_on(given_.batch)) {
        why = "it gives one row of many";
        if (any_other || !(size == batch->inner)) return false;
        size = rows() * batch->inner;
      }
    }
    lifted.push_back(std::move(own));
  }
  std::vector<graph::TensorMeta> kept;
  for (std::size_t i = 0; i < results.size(); ++i) {
    graph::TensorMeta& meta = graph_.tensors.at(results[i]);
    kept.push_back(meta);
    if (meta.sizes == lifted[i]) continue;
    meta.sizes = lifted[i];
    meta.strides = graph::contiguous_strides(meta.sizes);
    meta.storage_offset = 0;
  }
  if (const auto checked = apply_rule(input, why); !checked || *checked != *found) {
    for (std::size_t i = 0; i < results.size(); ++i) graph_.tensors.at(results[i]) = kept[i];
    return false;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if ((*found)[i]) batches_[results[i]] = *(*found)[i];
  }
  graph_.nodes.push_back(std::move(copy));
  return true;
}

Node GeneralForm::translated(const Node& node) const {
  Node copy = node;
  for (graph::NamedArgument& a : copy.inputs) {
    if (auto* t = std::get_if<TensorArg>(&a.value)) {
      if (is_tensor(t->name)) t->name = made(t->name);
    } else if (auto* list = std::get_if<graph::TensorListArg>(&a.value)) {
      for (std::string& name : list->names) name = made(name);
    } else if (auto* optional = std::get_if<graph::OptionalTensorListArg>(&a.value)) {
      for (auto& name : optional->names) name = name ? std::optional(made(*name)) : std::nullopt;
    }
  }
  return copy;
}

}  // namespace ikbo::transform
