#include "cli/auc.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace ikbo::cli {
namespace {

using Values = std::vector<double>;

TEST(Auc, KnownValues) {
  EXPECT_DOUBLE_EQ(auc(Values{1, 2, 3, 4}, Values{0, 0, 1, 1}).value(), 1.0);
  EXPECT_DOUBLE_EQ(auc(Values{4, 3, 2, 1}, Values{0, 0, 1, 1}).value(), 0.0);
  EXPECT_DOUBLE_EQ(auc(Values{1, 1, 1, 1}, Values{0, 1, 0, 1}).value(), 0.5);
  EXPECT_DOUBLE_EQ(auc(Values{0.1, 0.4, 0.35, 0.8}, Values{0, 0, 1, 1}).value(), 0.75);
  EXPECT_DOUBLE_EQ(auc(Values{1, 2, 2}, Values{0, 0, 1}).value(), 0.75);
}

TEST(Auc, NothingWhereItHasNoMeaning) {
  EXPECT_FALSE(auc(Values{1, 2}, Values{1, 1}));
  EXPECT_FALSE(auc(Values{1, 2}, Values{0, 0}));
  EXPECT_FALSE(auc(Values{}, Values{}));
  EXPECT_FALSE(auc(Values{std::nan(""), 2}, Values{0, 1}));
}

TEST(Auc, EqualsTheShareOfOrderedPairs) {
  std::mt19937 random(std::random_device{}());
  for (int repeat = 0; repeat < 20; ++repeat) {
    Values scores;
    Values labels{0, 1};
    for (int i = 0; i < 30; ++i) scores.push_back(static_cast<double>(random() % 10));
    for (int i = 2; i < 30; ++i) labels.push_back(static_cast<double>(random() % 2));
    double won = 0;
    double pairs = 0;
    for (std::size_t p = 0; p < 30; ++p) {
      for (std::size_t n = 0; n < 30; ++n) {
        if (labels[p] < 0.5 || labels[n] > 0.5) continue;
        ++pairs;
        won += scores[p] > scores[n] ? 1 : scores[p] == scores[n] ? 0.5 : 0;
      }
    }
    EXPECT_NEAR(auc(scores, labels).value(), won / pairs, 1e-12);
  }
}

}  // namespace
}  // namespace ikbo::cli
