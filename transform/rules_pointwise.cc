// Operators that compute every element from the elements at the same (broadcast) position.
#include <set>

#include "transform/rules.h"

namespace ikbo::transform {
namespace {

const std::set<std::string, std::less<>>& pointwise_names() {
  static const std::set<std::string, std::less<>> names{"__and__",
                                                        "__or__",
                                                        "__xor__",
                                                        "abs",
                                                        "acos",
                                                        "acosh",
                                                        "add",
                                                        "addcdiv",
                                                        "addcmul",
                                                        "alias",
                                                        "alpha_dropout",
                                                        "angle",
                                                        "asin",
                                                        "asinh",
                                                        "atan",
                                                        "atan2",
                                                        "atanh",
                                                        "bitwise_and",
                                                        "bitwise_left_shift",
                                                        "bitwise_not",
                                                        "bitwise_or",
                                                        "bitwise_right_shift",
                                                        "bitwise_xor",
                                                        "ceil",
                                                        "_conj",
                                                        "conj_physical",
                                                        "resolve_conj",
                                                        "celu",
                                                        "clamp",
                                                        "clamp_max",
                                                        "clamp_min",
                                                        "clip",
                                                        "clone",
                                                        "contiguous",
                                                        "copy",
                                                        "copysign",
                                                        "cos",
                                                        "cosh",
                                                        "deg2rad",
                                                        "detach",
                                                        "digamma",
                                                        "div",
                                                        "divide",
                                                        "dropout",
                                                        "elu",
                                                        "eq",
                                                        "erf",
                                                        "erfc",
                                                        "erfinv",
                                                        "exp",
                                                        "exp2",
                                                        "expm1",
                                                        "feature_dropout",
                                                        "fill",
                                                        "floor",
                                                        "floor_divide",
                                                        "fmax",
                                                        "fmin",
                                                        "fmod",
                                                        "frac",
                                                        "full_like",
                                                        "gelu",
                                                        "ge",
                                                        "greater",
                                                        "greater_equal",
                                                        "gt",
                                                        "hardshrink",
                                                        "hardsigmoid",
                                                        "hardswish",
                                                        "hardtanh",
                                                        "heaviside",
                                                        "hypot",
                                                        "isfinite",
                                                        "isinf",
                                                        "isnan",
                                                        "isneginf",
                                                        "isposinf",
                                                        "le",
                                                        "leaky_relu",
                                                        "lerp",
                                                        "less",
                                                        "less_equal",
                                                        "lgamma",
                                                        "lift_fresh_copy",
                                                        "log",
                                                        "log10",
                                                        "log1p",
                                                        "log2",
                                                        "log_sigmoid",
                                                        "logaddexp",
                                                        "logaddexp2",
                                                        "logical_and",
                                                        "logical_not",
                                                        "logical_or",
                                                        "logical_xor",
                                                        "logit",
                                                        "lt",
                                                        "masked_fill",
                                                        "maximum",
                                                        "minimum",
                                                        "mish",
                                                        "mul",
                                                        "multiply",
                                                        "nan_to_num",
                                                        "ne",
                                                        "neg",
                                                        "negative",
                                                        "not_equal",
                                                        "ones_like",
                                                        "positive",
                                                        "pow",
                                                        "rad2deg",
                                                        "reciprocal",
                                                        "relu",
                                                        "relu6",
                                                        "remainder",
                                                        "round",
                                                        "rsqrt",
                                                        "rsub",
                                                        "selu",
                                                        "sgn",
                                                        "sigmoid",
                                                        "sign",
                                                        "signbit",
                                                        "silu",
                                                        "sin",
                                                        "sinc",
                                                        "sinh",
                                                        "softplus",
                                                        "softshrink",
                                                        "softsign",
                                                        "special_expit",
                                                        "sqrt",
                                                        "square",
                                                        "sub",
                                                        "subtract",
                                                        "tan",
                                                        "tanh",
                                                        "tanhshrink",
                                                        "threshold",
                                                        "to",
                                                        "_to_copy",
                                                        "true_divide",
                                                        "trunc",
                                                        "type_as",
                                                        "where",
                                                        "xlogy",
                                                        "zero",
                                                        "zeros_like"};
  return names;
}

RuleResult pointwise(const RuleInput& in) {
  // where(condition) alone is nonzero: its size depends on data.
  if (aten_name(in.node().target) == "where" && in.node().inputs.size() < 3) return std::nullopt;
  return broadcasting_rows(in, in.operands());
}

// One parameter a channel (dimension 1), or a single one.
RuleResult prelu(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr || !in.shared("weight") || b->axis == 1) return std::nullopt;
  return std::vector<std::optional<Batch>>{*b};
}

// Values looked up in a shared, sorted table of boundaries.
RuleResult bucketize(const RuleInput& in) {
  const Batch* b = in.batch_of("self");
  if (b == nullptr || !in.shared("boundaries")) return std::nullopt;
  return std::vector<std::optional<Batch>>{*b};
}

}  // namespace

bool is_pointwise(std::string_view target) {
  return pointwise_names().contains(aten_name(target));
}

void add_pointwise_rules(RuleTable& table) {
  for (const std::string& name : pointwise_names()) table[name] = {pointwise, false};
  table["prelu"] = {prelu, false};
  table["bucketize"] = {bucketize, false};
  // other's size decides, and it is an operand like any other
  table["expand_as"] = {pointwise, false};
}

}  // namespace ikbo::transform
