// Masks over the keys of a request-only history, as each user's number of keys.
#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/diff.h>

#include <algorithm>
#include <limits>

#include "graph/error.h"
#include "transform/rewriter.h"

namespace ikbo::transform {

using graph::Argument;
using graph::Expr;
using graph::Node;
using graph::Role;
using graph::TensorArg;

namespace {

bool is_view(const std::string& op) {
  return keeps_order(op) || one_of(op, {"expand", "slice"});
}

}  // namespace

// Follows the mask back to one entry a user and key. Every step keeps this: the batch is outermost, keys are innermost,
// and mask[b, ..., l] depends on value[b, anything, l] alone. Only at a value that has nothing between the two is it
// known that heads and seeds see the same mask.
std::optional<Rewriter::KeyMask> Rewriter::key_mask(const std::string& mask, const Expr& length) const {
  const Expr batch = Expr::symbol(builder_.candidate_symbol());
  const std::map<std::string, Batch> none;
  const auto kept = [&](const std::string& name) {
    const auto it = values_.find(name);
    if (it == values_.end() || (it->second.level != Level::kUser && it->second.level != Level::kUniform)) return false;
    const auto& sizes = original_.tensors.at(name).sizes;
    return sizes.size() >= 2 && sizes[0].multiple_of(builder_.candidate_symbol()) && sizes.back() == length;
  };
  std::optional<KeyMask> found;
  bool negated = false;
  std::string name = mask;
  while (kept(name)) {
    const auto& meta = original_.tensors.at(name);
    const auto& sizes = meta.sizes;
    const bool between =
        std::any_of(sizes.begin() + 1, sizes.end() - 1, [](const Expr& e) { return !e.is_integer(1); });
    if (meta.dtype == graph::DType::kBool && sizes[0] == batch && !between) found = KeyMask{name, negated, false};
    const Node* node = values_.at(name).node;
    if (node == nullptr) break;
    const RuleInput in(original_, *node, builder_.candidate_symbol(), none);
    const std::string op = aten_name(node->target);
    const auto operands = in.operands();
    std::string next;
    if (is_view(op) && operands.size() == 1) {
      const auto& before = original_.tensors.at(operands[0]).sizes;
      // Expanded between batch and keys only; a slice takes everything.
      if (op == "expand" && (before.size() != sizes.size() || !(before[0] == sizes[0]))) break;
      if (op == "slice" && !(before == sizes)) break;
      next = operands[0];
    } else if (op == "_to_copy" && operands.size() == 1) {
      const auto before = original_.tensors.at(operands[0]).dtype;
      const bool same_kind = (before == graph::DType::kBool) == (meta.dtype == graph::DType::kBool);
      if (!same_kind || graph::is_floating(before) != graph::is_floating(meta.dtype)) break;
      next = operands[0];
    } else if (one_of(op, {"bitwise_not", "logical_not"}) && meta.dtype == graph::DType::kBool) {
      if (original_.tensors.at(operands[0]).dtype != graph::DType::kBool) break;
      next = operands[0];
      negated = !negated;
    } else if (const auto added = added_to_logits(in)) {  // true in it: minus infinity, not attended
      if (!(original_.tensors.at(added->value).sizes == sizes)) break;
      next = added->value;
      negated = !added->negated;
    } else {
      break;
    }
    name = next;
  }
  if (!found) return std::nullopt;
  if (name == found->value || (kept(name) && original_.tensors.at(name).dtype == graph::DType::kBool)) {
    if (const auto decreasing = is_prefix(name, length)) found->prefix = *decreasing != negated;
  }
  return found;
}

// 0 and minus infinity chosen by a condition: masked_fill(zeros, condition, -inf), where(condition, 0, -inf). The
// result is negated where minus infinity stands at false.
std::optional<Rewriter::KeyMask> Rewriter::added_to_logits(const RuleInput& in) const {
  const std::string op = aten_name(in.node().target);
  const double lowest = -std::numeric_limits<double>::infinity();
  if (op == "masked_fill") {
    const std::string* self = in.tensor("self");
    const std::string* mask = in.tensor("mask");
    const std::string* value = in.tensor("value");
    const auto number = value != nullptr ? filled_with(*value) : in.number("value");
    if (self == nullptr || mask == nullptr || filled_with(*self) != 0.0 || number != lowest) return std::nullopt;
    return KeyMask{*mask, false, false};
  }
  if (op != "where") return std::nullopt;
  const std::string* condition = in.tensor("condition");
  const std::string* self = in.tensor("self");
  const std::string* other = in.tensor("other");
  if (condition == nullptr) return std::nullopt;
  const auto if_true = self != nullptr ? filled_with(*self) : in.number("self");
  const auto if_false = other != nullptr ? filled_with(*other) : in.number("other");
  if (if_true == lowest && if_false == 0.0) return KeyMask{*condition, false, false};
  if (if_true == 0.0 && if_false == lowest) return KeyMask{*condition, true, false};
  return std::nullopt;
}

// The one number that all elements of a shared or uniform value are.
std::optional<double> Rewriter::filled_with(const std::string& name) const {
  if (const graph::Weight* weight = weight_of(name)) {
    const at::Tensor t = graph::weight_tensor(*weight);
    if (t.numel() != 1) return std::nullopt;
    return t.item<double>();
  }
  const auto it = values_.find(name);
  const Node* node = it != values_.end() ? it->second.node : nullptr;
  if (node == nullptr) return std::nullopt;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, *node, builder_.candidate_symbol(), none);
  const std::string op = aten_name(node->target);
  if (one_of(op, {"zeros", "zeros_like", "new_zeros"})) return 0.0;
  if (one_of(op, {"full", "full_like", "new_full"})) return in.number("fill_value");
  if (op == "scalar_tensor") return in.number("s");
  const bool passes = is_view(op) || op == "_to_copy";
  if (passes && in.operands().size() == 1) return filled_with(in.operands()[0]);
  return std::nullopt;
}

// Numbers that do not decrease along the last dimension, the same for all rows: arange, or a table of positions.
bool Rewriter::is_positions(const std::string& name, const Expr& length) const {
  const auto& sizes = original_.tensors.at(name).sizes;
  if (sizes.empty() || !(sizes.back() == length)) return false;
  if (const graph::Weight* weight = weight_of(name)) {
    const at::Tensor t = graph::weight_tensor(*weight);
    if (t.numel() != t.size(-1)) return false;
    return t.reshape({-1}).diff().ge(0).all().item<bool>();
  }
  const auto it = values_.find(name);
  const Node* node = it != values_.end() ? it->second.node : nullptr;
  if (node == nullptr || (it->second.level != Level::kShared && it->second.level != Level::kUniform)) return false;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, *node, builder_.candidate_symbol(), none);
  const std::string op = aten_name(node->target);
  if (op == "arange") return sizes.size() == 1 && (node->find("step") == nullptr || in.number("step") > 0.0);
  const bool passes = (is_view(op) && op != "slice") || op == "_to_copy";
  if (!passes || in.operands().size() != 1) return false;
  const bool to_bool = original_.tensors.at(name).dtype == graph::DType::kBool;
  return !to_bool && is_positions(in.operands()[0], length);
}

// Whether a comparison of positions with one number a user is true for the first keys (true) or the last ones (false).
std::optional<bool> Rewriter::is_prefix(const std::string& name, const Expr& length) const {
  const Node* node = values_.at(name).node;
  if (node == nullptr) return std::nullopt;
  const std::map<std::string, Batch> none;
  const RuleInput in(original_, *node, builder_.candidate_symbol(), none);
  const std::string op = aten_name(node->target);
  const auto operands = in.operands();
  const bool less = one_of(op, {"lt", "le", "less", "less_equal"});
  if (operands.size() != 2 || (!less && !one_of(op, {"gt", "ge", "greater", "greater_equal"}))) return std::nullopt;
  const auto a_number_a_user = [&](const std::string& v) {
    const auto& sizes = original_.tensors.at(v).sizes;
    return sizes.size() == original_.tensors.at(name).sizes.size() && sizes.back().is_integer(1);
  };
  if (is_positions(operands[0], length) && a_number_a_user(operands[1])) return less;
  if (is_positions(operands[1], length) && a_number_a_user(operands[0])) return !less;
  return std::nullopt;
}

// Each user's number of keys. Where they are not the first ones, keys and values are brought in that order, once a
// user: attention does not see the order of keys.
std::string Rewriter::apply_key_mask(const KeyMask& mask, const Expr& length, std::string& k, std::string& v) {
  const Expr users = Expr::symbol(builder_.user_symbol());
  const auto emit = [&](const char* target, std::vector<graph::NamedArgument> inputs, const char* name,
                        std::vector<Expr> sizes, graph::DType dtype) {
    graph::TensorMeta meta = builder_.meta(k);
    meta.dtype = dtype;
    meta.strides = graph::contiguous_strides(sizes);
    meta.sizes = std::move(sizes);
    meta.storage_offset = 0;
    return builder_.emit(target, std::move(inputs), name, std::move(meta), Role::kRequestOnly);
  };
  const auto inverted = [&](const std::string& value) {
    return emit("torch.ops.aten.logical_not.default", {{"self", TensorArg{value}, 1}}, "keys", {users, length},
                graph::DType::kBool);
  };
  const std::string given = builder_.reshape(at_user(mask.value), {users, length}, Role::kRequestOnly);
  const std::string valid = mask.negated ? inverted(given) : given;
  if (!mask.prefix) {
    const std::string order = emit("torch.ops.aten.argsort.stable",
                                   {{"self", TensorArg{mask.negated ? given : inverted(given)}, 1},
                                    {"stable", true, 2},
                                    {"dim", std::int64_t{1}, 2}},
                                   "valid_keys_first", {users, length}, graph::DType::kInt64);
    const std::string column = builder_.reshape(order, {users, length, 1, 1}, Role::kRequestOnly);
    for (std::string* rows : {&k, &v}) {
      const std::vector<Expr> sizes = builder_.meta(*rows).sizes;
      const std::string index = builder_.expand(column, sizes, Role::kRequestOnly);
      *rows = emit("torch.ops.aten.gather.default",
                   {{"self", TensorArg{*rows}, 1}, {"dim", std::int64_t{1}, 1}, {"index", TensorArg{index}, 1}},
                   "valid_keys_first", sizes, builder_.meta(*rows).dtype);
    }
  }
  return emit("torch.ops.aten.sum.dim_IntList",
              {{"self", TensorArg{valid}, 1},
               {"dim", std::vector<std::int64_t>{1}, 1},
               {"keepdim", false, 1},
               {"dtype", graph::DTypeArg{graph::DType::kInt32}, 2}},
              "kv_lengths", {users}, graph::DType::kInt32);
}

}  // namespace ikbo::transform
