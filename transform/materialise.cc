// Making a value of the original at the batch where somebody needs it.
#include <algorithm>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;
using graph::TensorMeta;

std::string Rewriter::at(const std::string& name, Where where) {
  return where == Where::kUser ? at_user(name) : at_candidate(name);
}

std::string Rewriter::at_user(const std::string& name) {
  Value& value = values_.at(name);
  switch (value.level) {
    case Level::kShared:
      return value.at_candidate;
    case Level::kUniform:
      if (value.at_user.empty()) clone(*value.node, Where::kUser, Role::kRequestOnly);
      return values_.at(name).at_user;
    case Level::kUser:
    case Level::kJagged:
      return value.at_user;
    case Level::kCandidate:
      break;
  }
  fail("internal error: candidate value '{}' was asked for at the user batch", name);
}

std::string Rewriter::at_candidate(const std::string& name) {
  {
    const Value& value = values_.at(name);
    if (!value.at_candidate.empty()) return value.at_candidate;
  }
  // What is made below may add values: no reference into the map is kept over it.
  const Value value = values_.at(name);
  std::string made;
  switch (value.level) {
    case Level::kShared:
      fail("internal error: shared value '{}' was never made", name);
    case Level::kJagged:
      fail("output '{}' is made of request-only bags of many lengths alone, without a row for each candidate", name);
    case Level::kUniform:
      clone(*value.node, Where::kCandidate, Role::kCandidate);
      made = values_.at(name).at_candidate;
      break;
    case Level::kUser:
      if (value.node != nullptr && is_view_to_repeat(*value.node)) {
        clone(*value.node, Where::kCandidate, Role::kReplicated);
        made = values_.at(name).at_candidate;
      } else {
        made = broadcast(value.at_user, *value.batch, original_.tensors.at(name));
        values_.at(name).at_candidate = made;
      }
      break;
    case Level::kCandidate:
      if (value.node != nullptr && value.parts && !value.parts->join && mode_ == Mode::kIkbo) {
        clone(*value.node, Where::kCandidate, Role::kCandidate);
        made = values_.at(name).at_candidate;
      } else if (value.parts) {
        made = join_parts(name, *value.parts);
        values_.at(name).at_candidate = made;
      } else {
        fail("internal error: candidate value '{}' was never made", name);
      }
      break;
  }
  return made;
}

// A broadcast of a view copies what the view shows. Where the operand is no larger, it is broadcast instead and viewed
// at the candidate batch: several views of one tensor then share one copy.
bool Rewriter::is_view_to_repeat(const Node& node) const {
  static const std::set<std::string, std::less<>> kViews{"view",   "reshape",      "unsqueeze", "squeeze",
                                                         "expand", "alias",        "transpose", "permute",
                                                         "detach", "_unsafe_view", "flatten"};
  if (mode_ == Mode::kBroadcast || !kViews.contains(aten_name(node.target))) return false;
  const auto names = graph::input_names(node);
  const auto it = names.empty() ? values_.end() : values_.find(names[0]);
  return it != values_.end() && it->second.level == Level::kUser;
}

Argument Rewriter::translate(const Argument& argument, Where where) {
  const auto tensor = [&](const std::string& name) { return at(name, where); };
  const auto integer = [&](const std::string& name) -> graph::SymInt {
    const Expr e = builder_.at(original_.sym_ints.at(name), where);
    if (builder_.computable(e)) return builder_.size(e);
    return {scalar(name)};
  };
  if (const auto* t = std::get_if<TensorArg>(&argument)) {
    if (is_tensor(t->name)) return TensorArg{tensor(t->name)};
    return argument;
  }
  if (const auto* list = std::get_if<graph::TensorListArg>(&argument)) {
    graph::TensorListArg out;
    for (const std::string& n : list->names) out.names.push_back(tensor(n));
    return out;
  }
  if (const auto* list = std::get_if<graph::OptionalTensorListArg>(&argument)) {
    graph::OptionalTensorListArg out;
    for (const auto& n : list->names) out.names.push_back(n ? std::optional(tensor(*n)) : std::nullopt);
    return out;
  }
  if (const auto* i = std::get_if<graph::SymInt>(&argument); i != nullptr && i->name() != nullptr) {
    const graph::SymInt value = integer(*i->name());
    if (const auto* plain = std::get_if<std::int64_t>(&value.value)) return *plain;
    return value;
  }
  if (const auto* list = std::get_if<graph::SymIntListArg>(&argument)) {
    graph::SymIntListArg out;
    for (const graph::SymInt& s : list->values) out.values.push_back(s.name() != nullptr ? integer(*s.name()) : s);
    return out;
  }
  if (const auto* f = std::get_if<graph::SymFloatArg>(&argument)) {
    if (const auto* n = std::get_if<std::string>(&f->value)) return graph::SymFloatArg{scalar(*n)};
  }
  if (const auto* b = std::get_if<graph::SymBoolArg>(&argument)) {
    if (const auto* n = std::get_if<std::string>(&b->value)) return graph::SymBoolArg{scalar(*n)};
  }
  return argument;
}

// A symbolic scalar of the original, as the original computes it: over the candidate batch.
std::string Rewriter::scalar(const std::string& name) {
  if (const auto it = scalars_.find(name); it != scalars_.end()) return it->second;
  const auto sym = original_.sym_ints.find(name);
  if (sym != original_.sym_ints.end() && builder_.computable(sym->second)) {
    const graph::SymInt value = builder_.size(sym->second);
    if (const auto* made = value.name()) return scalars_[name] = *made;
  }
  const auto node = scalar_nodes_.find(name);
  if (node == scalar_nodes_.end()) fail("the symbolic value '{}' is made by nothing that is understood", name);
  clone(*node->second, Where::kCandidate, Role::kConstant);
  return scalars_.at(name);
}

void Rewriter::clone(const Node& node, Where where, Role role) {
  Node copy;
  copy.target = node.target;
  copy.metadata = node.metadata;
  copy.metadata.erase("from_node");
  copy.extra = node.extra;
  for (const graph::NamedArgument& a : node.inputs) copy.inputs.push_back({a.name, translate(a.value, where), a.kind});
  // Layouts may differ from the original's (a broadcast is contiguous): reshape views where it can and copies else.
  if (copy.target == "torch.ops.aten.view.default") {
    copy.target = "torch.ops.aten.reshape.default";
    copy.inputs[1].name = "shape";
  }

  const auto place = [&](const std::string& name) {
    const std::string made = builder_.fresh(name);
    TensorMeta meta = builder_.at(original_.tensors.at(name), where);
    meta.requires_grad = false;
    builder_.graph.tensors.emplace(made, std::move(meta));
    Value& value = values_[name];
    if (value.node == nullptr) value.node = &node;
    (where == Where::kUser ? value.at_user : value.at_candidate) = made;
    return made;
  };
  for (const Argument& out : node.outputs) {
    if (const auto* t = std::get_if<TensorArg>(&out)) {
      copy.outputs.push_back(TensorArg{place(t->name)});
    } else if (const auto* list = std::get_if<graph::TensorListArg>(&out)) {
      graph::TensorListArg made;
      for (const std::string& n : list->names) made.names.push_back(place(n));
      copy.outputs.push_back(made);
    } else if (const auto* i = std::get_if<graph::SymInt>(&out); i != nullptr && i->name() != nullptr) {
      const std::string made = builder_.fresh(*i->name());
      builder_.graph.sym_ints.emplace(made, original_.sym_ints.at(*i->name()));
      scalars_[*i->name()] = made;
      copy.outputs.push_back(graph::SymInt{made});
    } else if (const auto* f = std::get_if<graph::SymFloatArg>(&out)) {
      const auto& name = std::get<std::string>(f->value);
      const std::string made = builder_.fresh(name);
      builder_.graph.sym_floats[made] = original_.sym_floats.at(name);
      scalars_[name] = made;
      copy.outputs.push_back(graph::SymFloatArg{made});
    } else if (const auto* b = std::get_if<graph::SymBoolArg>(&out)) {
      const auto& name = std::get<std::string>(b->value);
      const std::string made = builder_.fresh(name);
      builder_.graph.sym_bools[made] = original_.sym_bools.at(name);
      scalars_[name] = made;
      copy.outputs.push_back(graph::SymBoolArg{made});
    } else {
      copy.outputs.push_back(out);
    }
  }
  const auto made = graph::output_names(copy);
  copy.name = copy.outputs.size() == 1 && made.size() == 1 && std::holds_alternative<TensorArg>(copy.outputs[0])
                  ? made[0]
                  : builder_.fresh(node.name);
  std::string note;
  if (role == Role::kCandidate && !reason_.empty()) note = reason_;
  builder_.append(std::move(copy), role, std::move(note));
}

std::string Rewriter::broadcast(const std::string& user_value, const Batch& batch, const TensorMeta& original) {
  const auto axis = static_cast<std::size_t>(batch.axis);
  // A dimension of B * inner entries is one of B, and one of inner entries that move together.
  std::vector<Expr> split = original.sizes;
  const bool flattened = !batch.inner.is_integer(1);
  if (flattened) {
    split[axis] = Expr::symbol(builder_.candidate_symbol());
    split.insert(split.begin() + batch.axis + 1, batch.inner);
  }
  std::vector<Expr> user_split;
  for (const Expr& e : split) user_split.push_back(builder_.at(e, Where::kUser));
  const std::string note = fmt::format("for {}: {}", consumer_ != nullptr ? consumer_->name : "the output", reason_);
  std::string value = flattened ? builder_.reshape(user_value, user_split, Role::kRequestOnly) : user_value;

  TensorMeta meta = builder_.at(original, Where::kCandidate);
  meta.sizes = split;
  meta.strides = graph::contiguous_strides(split);
  meta.storage_offset = 0;
  if (batch.axis == 0) {
    value = builder_.emit("torch.ops.ikbo.broadcast.default",
                          {{"x_user", TensorArg{value}, 1}, {"candidate_to_user", TensorArg{index_}, 1}},
                          user_value + "_broadcast", meta, Role::kBroadcast, consumer_, note);
  } else {
    value = builder_.emit(
        "torch.ops.aten.index_select.default",
        {{"self", TensorArg{value}, 1}, {"dim", std::int64_t{batch.axis}, 1}, {"index", TensorArg{index_}, 1}},
        user_value + "_broadcast", meta, Role::kBroadcast, consumer_, note);
  }
  report_.stops.push_back({user_value, consumer_ != nullptr ? consumer_->name : "output",
                           consumer_ != nullptr ? consumer_->target : "output", reason_, graph::describe(meta)});
  return flattened ? builder_.reshape(value, original.sizes, Role::kReplicated) : value;
}

}  // namespace ikbo::transform
