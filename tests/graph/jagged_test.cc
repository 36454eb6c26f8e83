#include "graph/jagged.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

at::Tensor vector(std::vector<std::int64_t> values) {
  return at::tensor(at::ArrayRef<std::int64_t>(values), at::kLong);
}

const JaggedInput kWithEnd{{"values"}, "offsets", true};
const JaggedInput kWithoutEnd{{"values"}, "offsets", false};

TEST(Jagged, BoundsOfBothForms) {
  const at::Tensor values = vector({7, 8, 9});
  EXPECT_TRUE(at::equal(bag_bounds(kWithEnd, vector({0, 2, 2, 3}), values), vector({0, 2, 2, 3})));
  EXPECT_TRUE(at::equal(bag_bounds(kWithoutEnd, vector({0, 2, 2}).to(at::kInt), values), vector({0, 2, 2, 3})));
  EXPECT_TRUE(at::equal(bag_bounds(kWithoutEnd, vector({}), vector({})), vector({0})));
}

TEST(Jagged, WrongOffsetsAreNamed) {
  const auto message = [](const JaggedInput& input, std::vector<std::int64_t> offsets) -> std::string {
    try {
      bag_bounds(input, vector(std::move(offsets)), vector({7, 8, 9}));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message(kWithEnd, {1, 3}).find("'offsets' begins with 1"), std::string::npos);
  EXPECT_NE(message(kWithEnd, {0, 2, 1, 3}).find("has 1 after 2 at position 2"), std::string::npos);
  EXPECT_NE(message(kWithEnd, {0, 2}).find("ends with 2, but there are 3 values"), std::string::npos);
  EXPECT_NE(message(kWithEnd, {0, 4}).find("there are 3 values"), std::string::npos);
  EXPECT_NE(message(kWithoutEnd, {0, -1}).find("never decrease"), std::string::npos);
  EXPECT_NE(message(kWithEnd, {}).find("is empty"), std::string::npos);
}

TEST(Jagged, OffsetsMayLeaveOutValues) {
  EXPECT_NO_THROW(check_offsets(kWithEnd, vector({0, 2, 2}).to(at::kInt), 3));
  EXPECT_NO_THROW(check_offsets(kWithoutEnd, vector({}), 0));
  EXPECT_THROW(check_offsets(kWithEnd, vector({0, 2, 4}), 3), Error);
  EXPECT_THROW(check_offsets(kWithoutEnd, vector({0, 2, 1}), 3), Error);
  EXPECT_THROW(check_offsets(kWithEnd, vector({}), 0), Error);
}

TEST(Jagged, ValuesOfTheSameBagsHaveOneLength) {
  const JaggedInput two{{"ids", "kinds"}, "offsets", true};
  EXPECT_THROW(select_bags(two, {{vector({7, 8}), vector({1})}, vector({0, 2})}, vector({0})), Error);
  const JaggedRows unread = select_bags({{}, "offsets", true}, {{}, vector({5, 3})}, vector({0, 0, 0}));
  EXPECT_TRUE(unread.values.empty());
  EXPECT_TRUE(at::equal(unread.offsets, vector({0, 0, 0, 0})));
}

TEST(Jagged, BagsAreSelectedInAnyOrder) {
  const std::vector<at::Tensor> values{vector({7, 8, 9}), at::tensor({0.5, 1.5, 2.5})};
  const JaggedRows chosen = select_bags(kWithEnd, {values, vector({0, 2, 2, 3}).to(at::kInt)}, vector({2, 0, 1, 0}));
  EXPECT_TRUE(at::equal(chosen.values[0], vector({9, 7, 8, 7, 8})));
  EXPECT_TRUE(at::equal(chosen.values[1], at::tensor({2.5, 0.5, 1.5, 0.5, 1.5})));
  EXPECT_TRUE(at::equal(chosen.offsets, vector({0, 1, 3, 3, 5}).to(at::kInt)));
  const JaggedRows none = select_bags(kWithoutEnd, {values, vector({0, 2, 2})}, vector({}));
  EXPECT_EQ(none.values[0].numel(), 0);
  EXPECT_EQ(none.offsets.numel(), 0);
}

}  // namespace
}  // namespace ikbo::graph
