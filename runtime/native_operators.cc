// Symbolic arithmetic of exported graphs, with Python's meaning: floor division rounds down, the remainder has the
// divisor's sign, `/` gives a float.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

#include "graph/error.h"
#include "runtime/plan.h"

namespace ikbo::runtime {
namespace {

using c10::IValue;
using torch::jit::Stack;

IValue pop(Stack& stack) {
  IValue value = std::move(stack.back());
  stack.pop_back();
  return value;
}

bool integral(const IValue& v) {
  return v.isInt() || v.isBool();
}

std::int64_t to_int(const IValue& v) {
  if (v.isInt()) return v.toInt();
  if (v.isBool()) return v.toBool() ? 1 : 0;
  fail("expected an integer, got {}", v.tagKind());
}

double to_double(const IValue& v) {
  if (v.isDouble()) return v.toDouble();
  return static_cast<double>(to_int(v));
}

bool to_bool(const IValue& v) {
  if (v.isBool()) return v.toBool();
  return to_double(v) != 0;
}

std::int64_t double_to_int(double v) {
  // 2^63 is the first double that no longer fits; NaN fails the comparison too.
  if (!(std::abs(v) < 9223372036854775808.0)) fail("{} does not fit an integer", v);
  return static_cast<std::int64_t>(v);
}

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  if (b == 0) fail("division by zero");
  if (b == -1) {
    std::int64_t negated = 0;
    if (__builtin_sub_overflow(std::int64_t{0}, a, &negated)) fail("integer overflow");
    return negated;
  }
  const std::int64_t q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}

std::int64_t floor_remainder(std::int64_t a, std::int64_t b) {
  if (b == 0) fail("division by zero");
  if (b == -1) return 0;
  const std::int64_t r = a % b;
  return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r;
}

enum class Arithmetic { kAdd, kSub, kMul };

template <Arithmetic op>
void arithmetic(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (integral(a) && integral(b)) {
    std::int64_t result = 0;
    bool overflow = false;
    if constexpr (op == Arithmetic::kAdd) overflow = __builtin_add_overflow(to_int(a), to_int(b), &result);
    if constexpr (op == Arithmetic::kSub) overflow = __builtin_sub_overflow(to_int(a), to_int(b), &result);
    if constexpr (op == Arithmetic::kMul) overflow = __builtin_mul_overflow(to_int(a), to_int(b), &result);
    if (overflow) fail("integer overflow");
    stack.emplace_back(result);
    return;
  }
  const double x = to_double(a);
  const double y = to_double(b);
  stack.emplace_back(op == Arithmetic::kAdd ? x + y : op == Arithmetic::kSub ? x - y : x * y);
}

void floordiv(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (integral(a) && integral(b)) {
    stack.emplace_back(floor_divide(to_int(a), to_int(b)));
  } else {
    if (to_double(b) == 0) fail("division by zero");
    stack.emplace_back(std::floor(to_double(a) / to_double(b)));
  }
}

void truediv(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (to_double(b) == 0) fail("division by zero");
  stack.emplace_back(to_double(a) / to_double(b));
}

void mod(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (integral(a) && integral(b)) {
    stack.emplace_back(floor_remainder(to_int(a), to_int(b)));
    return;
  }
  const double y = to_double(b);
  if (y == 0) fail("division by zero");
  const double r = std::fmod(to_double(a), y);
  stack.emplace_back(r != 0 && ((r < 0) != (y < 0)) ? r + y : r);
}

void power(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (integral(a) && integral(b) && to_int(b) >= 0) {
    std::int64_t result = 1;
    std::int64_t base = to_int(a);
    for (std::int64_t exponent = to_int(b); exponent > 0; exponent >>= 1) {
      if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) fail("integer overflow");
      if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) fail("integer overflow");
    }
    stack.emplace_back(result);
    return;
  }
  stack.emplace_back(std::pow(to_double(a), to_double(b)));
}

template <typename Compare>
void compare(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  stack.emplace_back(integral(a) && integral(b) ? Compare()(to_int(a), to_int(b))
                                                : Compare()(to_double(a), to_double(b)));
}

template <bool both>
void logical(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (a.isBool() && b.isBool()) {
    stack.emplace_back(both ? a.toBool() && b.toBool() : a.toBool() || b.toBool());
  } else {
    stack.emplace_back(both ? to_int(a) & to_int(b) : to_int(a) | to_int(b));
  }
}

template <bool left>
void shift(Stack& stack) {
  const std::int64_t by = to_int(pop(stack));
  const std::int64_t a = to_int(pop(stack));
  if (by < 0 || by > 62) fail("shift by {}", by);
  std::int64_t result = a >> by;
  if (left && __builtin_mul_overflow(a, std::int64_t{1} << by, &result)) fail("integer overflow");
  stack.emplace_back(result);
}

void negate(Stack& stack) {
  const IValue a = pop(stack);
  if (!integral(a)) {
    stack.emplace_back(-to_double(a));
    return;
  }
  std::int64_t result = 0;
  if (__builtin_sub_overflow(std::int64_t{0}, to_int(a), &result)) fail("integer overflow");
  stack.emplace_back(result);
}

void identity(Stack&) {}

template <double (*function)(double)>
void rounding(Stack& stack) {
  const IValue a = pop(stack);
  stack.emplace_back(integral(a) ? to_int(a) : double_to_int(function(to_double(a))));
}

void square_root(Stack& stack) {
  const double a = to_double(pop(stack));
  if (a < 0) fail("square root of {}", a);
  stack.emplace_back(std::sqrt(a));
}

void logical_not(Stack& stack) {
  stack.emplace_back(!to_bool(pop(stack)));
}
void as_float(Stack& stack) {
  stack.emplace_back(to_double(pop(stack)));
}

void if_then_else(Stack& stack) {
  IValue no = pop(stack);
  IValue yes = pop(stack);
  stack.push_back(to_bool(pop(stack)) ? std::move(yes) : std::move(no));
}

template <bool largest>
void extremum(Stack& stack) {
  const IValue b = pop(stack);
  const IValue a = pop(stack);
  if (integral(a) && integral(b)) {
    stack.emplace_back(largest ? std::max(to_int(a), to_int(b)) : std::min(to_int(a), to_int(b)));
  } else {
    stack.emplace_back(largest ? std::max(to_double(a), to_double(b)) : std::min(to_double(a), to_double(b)));
  }
}

void sum(Stack& stack) {
  std::int64_t total = 0;
  for (const std::int64_t v : pop(stack).toIntVector()) {
    if (__builtin_add_overflow(total, v, &total)) fail("integer overflow");
  }
  stack.emplace_back(total);
}

std::int64_t wrap_dim(std::int64_t dim, std::int64_t rank) {
  if (dim < -rank || dim >= rank) fail("dimension {} of a tensor with {} dimensions", dim, rank);
  return dim < 0 ? dim + rank : dim;
}

void sym_size(Stack& stack) {
  const std::int64_t dim = to_int(pop(stack));
  const IValue value = pop(stack);
  const at::Tensor& tensor = value.toTensor();
  stack.emplace_back(tensor.size(wrap_dim(dim, tensor.dim())));
}

void sym_stride(Stack& stack) {
  const std::int64_t dim = to_int(pop(stack));
  const IValue value = pop(stack);
  const at::Tensor& tensor = value.toTensor();
  stack.emplace_back(tensor.stride(wrap_dim(dim, tensor.dim())));
}

void sym_numel(Stack& stack) {
  const IValue value = pop(stack);
  stack.emplace_back(value.toTensor().numel());
}

void sym_storage_offset(Stack& stack) {
  const IValue value = pop(stack);
  stack.emplace_back(value.toTensor().storage_offset());
}

// (Scalar self, str assert_msg)
void assert_scalar(Stack& stack) {
  const IValue message = pop(stack);
  if (!to_bool(pop(stack))) fail("assertion of the model failed: {}", message.toStringRef());
}

// (Scalar size, *, int? min, int? max)
void constrain_range(Stack& stack) {
  const IValue max = pop(stack);
  const IValue min = pop(stack);
  const double size = to_double(pop(stack));
  if ((!min.isNone() && size < to_double(min)) || (!max.isNone() && size > to_double(max))) {
    fail("a size is {}, outside the range the model was exported with", size);
  }
}

}  // namespace

NativeOperator find_native_operator(const std::string& target) {
  static const std::unordered_map<std::string, NativeOperator> operators = {
      {"_operator.add", arithmetic<Arithmetic::kAdd>},
      {"_operator.sub", arithmetic<Arithmetic::kSub>},
      {"_operator.mul", arithmetic<Arithmetic::kMul>},
      {"_operator.floordiv", floordiv},
      {"_operator.truediv", truediv},
      {"_operator.mod", mod},
      {"_operator.pow", power},
      {"_operator.neg", negate},
      {"_operator.pos", identity},
      {"_operator.eq", compare<std::equal_to<>>},
      {"_operator.ne", compare<std::not_equal_to<>>},
      {"_operator.lt", compare<std::less<>>},
      {"_operator.le", compare<std::less_equal<>>},
      {"_operator.gt", compare<std::greater<>>},
      {"_operator.ge", compare<std::greater_equal<>>},
      {"_operator.and_", logical<true>},
      {"_operator.or_", logical<false>},
      {"_operator.lshift", shift<true>},
      {"_operator.rshift", shift<false>},
      {"math.floor", rounding<std::floor>},
      {"math.ceil", rounding<std::ceil>},
      {"math.trunc", rounding<std::trunc>},
      {"torch.sym_int", rounding<std::trunc>},
      {"math.sqrt", square_root},
      {"torch.sym_sqrt", square_root},
      {"torch._sym_sqrt", square_root},
      {"torch.sym_not", logical_not},
      {"torch.sym_float", as_float},
      {"torch.sym_ite", if_then_else},
      {"torch.sym_max", extremum<true>},
      {"torch.sym_min", extremum<false>},
      {"torch.sym_sum", sum},
      {"torch.ops.aten.sym_size.int", sym_size},
      {"torch.ops.aten.sym_stride.int", sym_stride},
      {"torch.ops.aten.sym_numel.default", sym_numel},
      {"torch.ops.aten.sym_storage_offset.default", sym_storage_offset},
      {"torch.ops.aten._assert_scalar.default", assert_scalar},
      {"torch.ops.aten.sym_constrain_range.default", constrain_range},
      {"torch.ops.aten.sym_constrain_range_for_size.default", constrain_range},
  };
  const auto found = operators.find(target);
  return found == operators.end() ? nullptr : found->second;
}

}  // namespace ikbo::runtime
