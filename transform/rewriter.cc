// Levels: which batch each operator of the original follows, and where it is placed in the new program.
#include "transform/rewriter.h"

#include <algorithm>

#include "graph/error.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;

Rewriter::Rewriter(const graph::Archive& archive, const graph::Graph& original, Mode mode, Builder& builder,
                   Report& report, std::string index)
    : archive_(archive),
      original_(original),
      mode_(mode),
      builder_(builder),
      report_(report),
      index_(std::move(index)) {
  for (const graph::InputSpec& spec : archive.program.input_specs) {
    if (spec.kind == graph::InputKind::kParameter || spec.kind == graph::InputKind::kBuffer ||
        spec.kind == graph::InputKind::kTensorConstant) {
      parameter_targets_[std::get<graph::TensorArg>(spec.value).name] = spec.target;
    }
  }
  for (const Node& node : original.nodes) {
    for (const std::string& name : graph::input_names(node)) readers_[name].push_back(&node);
  }
}

void Rewriter::bind_input(const std::string& name, Value value) {
  if (value.level == Level::kCandidate) candidate_dependent_.insert(name);
  values_[name] = std::move(value);
}

bool Rewriter::depends_on_candidates(const std::string& name) const {
  return candidate_dependent_.contains(name);
}

std::string Rewriter::output(const std::string& name) {
  consumer_ = nullptr;
  reason_ = "it is an output";
  return is_tensor(name) ? at_candidate(name) : scalar(name);
}

void Rewriter::run() {
  for (const Node& node : original_.nodes) visit(node);
}

std::optional<Batch> Rewriter::batch_shown_by_sizes(const std::string& name) const {
  const auto& sizes = original_.tensors.at(name).sizes;
  std::optional<Batch> batch;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (!sizes[d].depends_on(builder_.candidate_symbol())) continue;
    const auto inner = sizes[d].multiple_of(builder_.candidate_symbol());
    if (batch || !inner) return std::nullopt;
    batch = Batch{static_cast<int>(d), *inner};
  }
  return batch;
}

// An integer argument, or the size of a result, that depends on the batch.
bool Rewriter::sizes_depend_on_batch(const Node& node) const {
  const std::string& symbol = builder_.candidate_symbol();
  for (const std::string& name : graph::input_names(node)) {
    const auto it = original_.sym_ints.find(name);
    if (it != original_.sym_ints.end() && it->second.depends_on(symbol)) return true;
  }
  for (const std::string& name : graph::output_names(node)) {
    if (!is_tensor(name)) continue;
    for (const Expr& e : original_.tensors.at(name).sizes) {
      if (e.depends_on(symbol)) return true;
    }
  }
  return false;
}

// Whether a rule may move the operator to the user batch although arguments depend on the batch.
bool Rewriter::only_sizes_depend_on_batch(const Node& node) const {
  const Rule* rule = find_rule(node.target);
  for (const std::string& name : graph::input_names(node)) {
    if (is_tensor(name)) continue;
    const auto it = original_.sym_ints.find(name);
    if (it == original_.sym_ints.end()) return false;  // a symbolic float or bool: who knows what it depends on
    if (!builder_.computable(it->second)) return false;
    if (it->second.depends_on(builder_.candidate_symbol()) && (rule == nullptr || !rule->sizes_follow)) return false;
  }
  return true;
}

void Rewriter::visit(const Node& node) {
  consumer_ = &node;
  const auto results = graph::output_names(node);
  const bool makes_tensor = std::any_of(results.begin(), results.end(), [&](const auto& n) { return is_tensor(n); });
  const bool of_bags = concerns_bags(node);
  if (!makes_tensor) {
    if (results.empty()) {
      if (!of_bags) visit_assertion(node);  // what it says of bags, it says of each candidate's copies
    } else {
      for (const std::string& name : results) scalar_nodes_[name] = &node;
    }
    return;
  }

  if (of_bags) return visit_bags(node);

  bool any_user = false;
  bool any_candidate = false;
  bool any_uniform = false;
  for (const std::string& name : graph::input_names(node)) {
    if (candidate_dependent_.contains(name)) candidate_dependent_.insert(results.begin(), results.end());
    const auto it = values_.find(name);
    if (it == values_.end()) continue;
    any_user = any_user || it->second.level == Level::kUser;
    any_uniform = any_uniform || it->second.level == Level::kUniform;
    any_candidate = any_candidate || it->second.level == Level::kCandidate;
  }

  if (is_random(node)) {
    report_.warnings.push_back(fmt::format(
        "{} ({}) draws random numbers: it runs for every candidate, as in the original", node.name, node.target));
  }
  const std::string name = aten_name(node.target);
  if (name.find("batch_norm") != std::string::npos) {
    if (boolean_argument(node, "training") == true || name == "_native_batch_norm_legit_functional") {
      report_.warnings.push_back(fmt::format(
          "{} ({}) uses the statistics of the batch: it stays on the candidate batch, and a candidate's score depends "
          "on the others in it, as in the original",
          node.name, node.target));
    }
  }

  std::string why;
  if (!any_user && !any_candidate && !any_uniform && !sizes_depend_on_batch(node)) {
    bool scalars_known = true;  // a symbolic float or bool may hide the batch
    for (const std::string& input : graph::input_names(node)) {
      scalars_known = scalars_known && (is_tensor(input) || original_.sym_ints.contains(input));
    }
    clone(node, Where::kShared, scalars_known ? Role::kConstant : Role::kCandidate);
    for (const std::string& result : results) values_[result].level = Level::kShared;
    return;
  }
  if (!any_candidate && try_rows(node, why)) return;
  if (any_candidate) {
    why = "it meets candidate values";
    if (pass_through_parts(node)) return;
    if (mode_ == Mode::kIkbo) {
      if (lower_product(node) || lower_attention(node)) return;
      if (auto parts = make_parts(node)) {
        Value value{Level::kCandidate, batch_shown_by_sizes(results[0]), {}, {}, &node, std::move(*parts)};
        values_[results[0]] = std::move(value);
        return;
      }
    }
  }
  place_at_candidates(node, why);
}

// Row-independent, and only user and uniform rows: to the user batch, or wherever it is needed.
bool Rewriter::try_rows(const Node& node, std::string& why) {
  std::map<std::string, Batch> batched;
  bool any_user = false;
  for (const std::string& name : graph::input_names(node)) {
    const auto it = values_.find(name);
    if (it == values_.end() || it->second.level == Level::kShared) continue;
    batched.emplace(name, *it->second.batch);
    any_user = any_user || it->second.level == Level::kUser;
  }
  if (!only_sizes_depend_on_batch(node)) {
    why = "a number that it is given depends on the batch size";
    return false;
  }
  const RuleInput input(original_, node, builder_.candidate_symbol(), batched);
  const RuleResult rows = apply_rule(input, why);
  if (!rows) return false;
  const auto results = input.results();
  for (std::size_t i = 0; i < results.size(); ++i) {
    Value value{any_user ? Level::kUser : Level::kUniform, (*rows)[i], {}, {}, &node, {}};
    if (!value.batch) value.level = Level::kShared;  // empty statistics and the like
    values_[results[i]] = std::move(value);
  }
  if (any_user) {
    // System-level broadcast has every request-only operator run on copies, like the original.
    const bool copies = mode_ == Mode::kBroadcast;
    clone(node, copies ? Where::kCandidate : Where::kUser, copies ? Role::kReplicated : Role::kRequestOnly);
    for (const std::string& name : results) {
      Value& v = values_[name];
      if (v.level == Level::kShared) v.at_candidate = copies ? v.at_candidate : v.at_user;
    }
  }
  return true;
}

void Rewriter::place_at_candidates(const Node& node, const std::string& why) {
  reason_ = why;
  clone(node, Where::kCandidate, Role::kCandidate);
  for (const std::string& name : graph::output_names(node)) {
    if (!is_tensor(name)) continue;
    Value& value = values_[name];
    value.level = Level::kCandidate;
    value.batch = batch_shown_by_sizes(name);
    value.node = &node;
  }
}

// Checks make no value. A check of a request-only tensor's type follows the tensor; all others see the candidate batch.
void Rewriter::visit_assertion(const Node& node) {
  reason_ = "it is checked there";
  if (aten_name(node.target) != "_assert_tensor_metadata") {
    clone(node, Where::kCandidate, Role::kCandidate);
    return;
  }
  const auto sized = [&](const char* argument) {
    const Argument* a = node.find(argument);
    return a != nullptr && !std::holds_alternative<graph::NoneArg>(*a);
  };
  const auto names = graph::input_names(node);
  if (names.size() != 1 || sized("size") || sized("stride")) return;  // holds of the example's layout only
  const Value& value = values_.at(names[0]);
  if (value.level == Level::kUser && mode_ != Mode::kBroadcast) {
    clone(node, Where::kUser, Role::kRequestOnly);
  } else if (!value.at_candidate.empty()) {
    clone(node, Where::kCandidate, value.level == Level::kShared ? Role::kConstant : Role::kCandidate);
  }
}

}  // namespace ikbo::transform
