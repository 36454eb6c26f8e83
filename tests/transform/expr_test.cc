#include "graph/expr.h"

#include <gtest/gtest.h>

#include <random>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

const Expr kB = Expr::symbol("s3");
const Expr kL = Expr::symbol("s7");

TEST(Expr, EqualSizesCompareEqualHoweverWritten) {
  EXPECT_EQ((kB + 1) * kL, kL * kB + kL);
  EXPECT_EQ(kB * 2 - kB, kB);
  EXPECT_EQ(kB - kB, Expr(0));
  EXPECT_FALSE(kB == kL);
  EXPECT_FALSE(kB * kB == kB);
}

TEST(Expr, ReadsAndWritesSrepr) {
  const char* text = "Mul(Integer(50), Symbol('s3', positive=True, integer=True))";
  EXPECT_EQ(Expr::parse(text), kB * 50);
  for (const char* symbol : {"Symbol('s3', positive=True, integer=True)", "Symbol('u0', integer=True)"}) {
    EXPECT_EQ(Expr::parse(symbol).srepr(), symbol);
  }
  for (const Expr& e : {kB * 50, kB * kL + 3, Expr::call("FloorDiv", {kB + 1, 2}), Expr(-4), Expr(0),
                        Expr::call("Max", {kB, Expr::call("Mod", {kL, 4})}) * kB}) {
    EXPECT_EQ(Expr::parse(e.srepr()), e) << e.srepr();
  }
}

TEST(Expr, RefusesWhatIsNoExpression) {
  for (const char* text :
       {"", "Mul(", "Mul(Integer(2)", "Symbol(s3)", "Symbol('s3'", "Integer(x)", "Integer(2) Integer(3)",
        "Integer(99999999999999999999)", "Symbol('')", "Symbol('a b')", "3 + 4"}) {
    EXPECT_THROW(Expr::parse(text), Error) << text;
  }
  EXPECT_THROW(Expr::parse(std::string(5000, '(')), Error);
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "Mod(";
  EXPECT_THROW(Expr::parse(deep), Error);
}

TEST(Expr, OverflowIsRefusedNotWrapped) {
  const Expr huge = INT64_MAX;
  EXPECT_THROW(huge * 2, Error);
  EXPECT_THROW(huge + 1, Error);
  EXPECT_FALSE((kB * INT64_MAX).evaluate({{"s3", 4}}).has_value());
}

TEST(Expr, QuotientsAreExactOrAbsent) {
  EXPECT_EQ((kB * kL * 6).exact_quotient(kB * 2), kL * 3);
  EXPECT_FALSE((kB * 3).exact_quotient(kB * 2).has_value());
  EXPECT_FALSE((kB + 1).exact_quotient(kB).has_value());
  EXPECT_FALSE(kB.exact_quotient(0).has_value());
  EXPECT_EQ((kB * kL).multiple_of("s3"), kL);
  EXPECT_FALSE((kB * kB).multiple_of("s3").has_value());
  EXPECT_FALSE((kB + kL).multiple_of("s3").has_value());
}

TEST(Expr, DivisionAndModuloFollowPython) {
  const std::map<std::string, std::int64_t> values{{"s3", 7}, {"s7", 2}};
  EXPECT_EQ(Expr::call("FloorDiv", {kB, kL}).evaluate(values), 3);
  EXPECT_EQ(Expr::call("Mod", {kB, kL}).evaluate(values), 1);
  EXPECT_EQ(Expr::call("FloorDiv", {Expr(0) - kB, kL}).evaluate(values), -4);
  EXPECT_EQ(Expr::call("FloorDiv", {kB * 6, 6}), kB);
  EXPECT_FALSE(Expr::call("FloorDiv", {kB, 0}).evaluate(values).has_value());
  EXPECT_FALSE(Expr::call("Unknown", {kB}).evaluate(values).has_value());
  EXPECT_FALSE(kB.evaluate({}).has_value());
}

// Substitution and evaluation commute: random polynomials, random values.
TEST(Expr, SubstitutionAgreesWithEvaluation) {
  std::mt19937 random(5);
  const auto draw = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 200; ++round) {
    Expr e = draw(5);
    for (int i = 0; i < 4; ++i) {
      const Expr factor = draw(2) == 0 ? kB : kL;
      e = draw(2) == 0 ? e * (factor + Expr(draw(3))) : e + factor * Expr(draw(7) - 3);
    }
    const std::int64_t b = draw(9);
    const std::int64_t l = draw(9);
    const auto direct = e.evaluate({{"s3", b}, {"s7", l}});
    ASSERT_TRUE(direct.has_value());
    EXPECT_EQ(e.substitute({{"s3", Expr(b)}}).substitute({{"s7", Expr(l)}}).as_integer(), direct);
    EXPECT_EQ(Expr::parse(e.srepr()), e);
  }
}

}  // namespace
}  // namespace ikbo::graph
