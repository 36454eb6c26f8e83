#include <gtest/gtest.h>

#include <cmath>

#include "graph/error.h"
#include "runtime/plan.h"

namespace ikbo::runtime {
namespace {

using c10::IValue;

IValue call(const std::string& target, std::vector<IValue> arguments) {
  const NativeOperator op = find_native_operator(target);
  if (op == nullptr) throw Error("no operator " + target);
  torch::jit::Stack stack = std::move(arguments);
  op(stack);
  EXPECT_EQ(stack.size(), 1U) << target;
  return stack.back();
}

struct IntegerCase {
  const char* target;
  std::vector<IValue> arguments;
  std::int64_t expected;
};

// Values as Python gives them.
TEST(NativeOperators, IntegersAsPython) {
  const IntegerCase cases[] = {
      {"_operator.add", {3, 4}, 7},        {"_operator.sub", {3, 4}, -1},
      {"_operator.mul", {-3, 4}, -12},     {"_operator.floordiv", {7, 2}, 3},
      {"_operator.floordiv", {-7, 2}, -4}, {"_operator.floordiv", {7, -2}, -4},
      {"_operator.floordiv", {-7, -2}, 3}, {"_operator.mod", {7, 3}, 1},
      {"_operator.mod", {-7, 3}, 2},       {"_operator.mod", {7, -3}, -2},
      {"_operator.mod", {-7, -3}, -1},     {"_operator.pow", {2, 10}, 1024},
      {"_operator.pow", {-3, 3}, -27},     {"_operator.pow", {5, 0}, 1},
      {"_operator.neg", {5}, -5},          {"_operator.pos", {5}, 5},
      {"math.floor", {-2.5}, -3},          {"math.ceil", {-2.5}, -2},
      {"math.trunc", {-2.5}, -2},          {"math.floor", {7}, 7},
      {"torch.sym_int", {2.9}, 2},         {"torch.sym_max", {3, 9}, 9},
      {"torch.sym_min", {3, 9}, 3},        {"torch.sym_ite", {true, 1, 2}, 1},
      {"torch.sym_ite", {false, 1, 2}, 2}, {"_operator.lshift", {3, 2}, 12},
      {"_operator.rshift", {-5, 1}, -3},   {"_operator.and_", {6, 3}, 2},
      {"_operator.or_", {6, 3}, 7},
  };
  for (const IntegerCase& c : cases) {
    const IValue result = call(c.target, c.arguments);
    ASSERT_TRUE(result.isInt()) << c.target;
    EXPECT_EQ(result.toInt(), c.expected) << c.target;
  }
}

TEST(NativeOperators, FloatsAsPython) {
  EXPECT_DOUBLE_EQ(call("_operator.truediv", {7, 2}).toDouble(), 3.5);
  EXPECT_DOUBLE_EQ(call("_operator.floordiv", {7.5, 2}).toDouble(), 3.0);
  EXPECT_DOUBLE_EQ(call("_operator.mod", {-7.5, 2}).toDouble(), 0.5);
  EXPECT_DOUBLE_EQ(call("_operator.pow", {2, -1}).toDouble(), 0.5);
  EXPECT_DOUBLE_EQ(call("_operator.mul", {2, 0.25}).toDouble(), 0.5);
  EXPECT_DOUBLE_EQ(call("math.sqrt", {9}).toDouble(), 3.0);
  EXPECT_DOUBLE_EQ(call("torch.sym_float", {9}).toDouble(), 9.0);
  EXPECT_DOUBLE_EQ(call("torch.sym_max", {1, 2.5}).toDouble(), 2.5);
}

TEST(NativeOperators, Comparisons) {
  EXPECT_TRUE(call("_operator.eq", {3, 3}).toBool());
  EXPECT_TRUE(call("_operator.ne", {3, 4}).toBool());
  EXPECT_TRUE(call("_operator.lt", {3, 3.5}).toBool());
  EXPECT_FALSE(call("_operator.ge", {3, 4}).toBool());
  EXPECT_TRUE(call("torch.sym_not", {false}).toBool());
  EXPECT_FALSE(call("_operator.and_", {true, false}).toBool());
  // Compared as integers: as doubles these would be equal.
  EXPECT_FALSE(call("_operator.eq", {(std::int64_t{1} << 53) + 1, std::int64_t{1} << 53}).toBool());
}

TEST(NativeOperators, OverflowAndZeroAreErrors) {
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  const std::int64_t smallest = std::numeric_limits<std::int64_t>::min();
  EXPECT_THROW(call("_operator.mul", {largest, 2}), Error);
  EXPECT_THROW(call("_operator.add", {largest, 1}), Error);
  EXPECT_THROW(call("_operator.pow", {10, 40}), Error);
  EXPECT_THROW(call("_operator.neg", {smallest}), Error);
  EXPECT_THROW(call("_operator.floordiv", {smallest, -1}), Error);
  EXPECT_THROW(call("_operator.floordiv", {1, 0}), Error);
  EXPECT_THROW(call("_operator.mod", {1, 0}), Error);
  EXPECT_THROW(call("_operator.truediv", {1, 0}), Error);
  EXPECT_THROW(call("math.trunc", {1e30}), Error);
  EXPECT_THROW(call("torch.sym_int", {std::nan("")}), Error);
  EXPECT_EQ(call("_operator.mod", {smallest, -1}).toInt(), 0);
}

TEST(NativeOperators, UnknownIsNull) {
  EXPECT_EQ(find_native_operator("_operator.matmul"), nullptr);
}

}  // namespace
}  // namespace ikbo::runtime
