#include "runtime/verify.h"

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <set>

#include "runtime/random_inputs.h"
#include "tests/runtime/small_ranker.h"

namespace ikbo::runtime {
namespace {

using testing::message_of;
using testing::small_ranker;

TEST(Verify, EqualModelsPass) {
  const auto ranker = small_ranker();
  const VerifyResult result = verify(ranker.original, ranker.transformed, {});
  EXPECT_TRUE(result.passed(false));
  EXPECT_TRUE(result.float64) << result.why_not_float64;
  EXPECT_TRUE(result.user_inputs_move_scores && result.candidate_inputs_move_scores);
  std::set<std::string> mappings;
  bool one = false;
  bool equal = false;
  for (const VerifyCheck& check : result.checks) {
    mappings.insert(check.mapping);
    one = one || check.candidates == 1;
    equal = equal || (check.users == check.candidates && check.users > 1);
  }
  EXPECT_EQ(mappings, (std::set<std::string>{"even", "uneven", "unsorted"}));
  EXPECT_TRUE(one && equal);
}

TEST(Verify, SmallErrorsFail) {
  const auto ranker = small_ranker(/*broken=*/true);
  EXPECT_FALSE(verify(ranker.original, ranker.transformed, {}).passed(true));
}

TEST(Verify, AnotherModelFails) {
  const auto a = small_ranker();
  const auto b = small_ranker();
  EXPECT_FALSE(verify(a.original, b.transformed, {}).passed(true));
}

TEST(Verify, DeadModelProvesNothing) {
  const auto ranker = small_ranker(false, /*dead_user=*/true);
  const VerifyResult result = verify(ranker.original, ranker.transformed, {});
  EXPECT_FALSE(result.user_inputs_move_scores);
  EXPECT_TRUE(result.candidate_inputs_move_scores);
  EXPECT_FALSE(result.passed(false));
  EXPECT_TRUE(result.passed(true));
}

TEST(Verify, NotTransformed) {
  const auto ranker = small_ranker();
  EXPECT_NE(message_of([&] { verify(ranker.original, ranker.original, {}); }).find("not transformed"),
            std::string::npos);
}

TEST(RandomInputs, IdsAreValidAndMappingsAreWhatTheySay) {
  const auto ranker = small_ranker();
  RandomInputs random(ranker.transformed, specification_of(ranker.transformed), 1);
  const auto inputs = random.draw(50, 500);
  EXPECT_EQ(inputs[0].min().item<std::int64_t>(), 0);
  EXPECT_EQ(inputs[0].max().item<std::int64_t>(), testing::kUsers - 1);
  EXPECT_EQ(inputs[1].max().item<std::int64_t>(), testing::kItems - 1);
  for (const char* kind : {"even", "uneven", "unsorted"}) {
    const at::Tensor index = random.mapping(kind, 5, 64);
    const at::Tensor steps = index.narrow(0, 1, 63) - index.narrow(0, 0, 63);
    EXPECT_EQ(steps.min().item<std::int64_t>() < 0, std::string(kind) == "unsorted") << kind;
    EXPECT_GE(index.min().item<std::int64_t>(), 0);
    EXPECT_LT(index.max().item<std::int64_t>(), 5);
  }
}

}  // namespace
}  // namespace ikbo::runtime
