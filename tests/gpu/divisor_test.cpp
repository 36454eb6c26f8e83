#include "kernels/divisor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace ikbo::kernels {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

void expect_exact(int64_t divisor, int64_t number) {
  ASSERT_EQ(divisor_of(divisor).quotient(static_cast<uint32_t>(number)), number / divisor)
      << number << " by " << divisor;
}

// Where quotients change, and at both ends.
void expect_exact_everywhere(int64_t divisor, std::mt19937_64& random) {
  for (int i = 0; i < 20; ++i) {
    const int64_t multiple = static_cast<int64_t>(random() % static_cast<uint64_t>(kMost / divisor + 1)) * divisor;
    for (const int64_t number : {multiple - 1, multiple, multiple + 1}) {
      expect_exact(divisor, std::clamp<int64_t>(number, 0, kMost));
    }
  }
  expect_exact(divisor, 0);
  expect_exact(divisor, kMost);
  expect_exact(divisor, kMost / divisor * divisor - 1);
}

TEST(Divisor, AgreesWithDivision) {
  std::mt19937_64 random(std::random_device{}());
  for (int64_t divisor = 1; divisor <= 2'000; ++divisor) expect_exact_everywhere(divisor, random);
  for (int bits = 1; bits <= 31; ++bits) {
    for (const int64_t divisor : {(int64_t{1} << bits) - 1, int64_t{1} << bits, (int64_t{1} << bits) + 1}) {
      if (divisor <= kMost) expect_exact_everywhere(divisor, random);
    }
  }
  for (int i = 0; i < 2'000; ++i) {
    expect_exact_everywhere(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kMost)), random);
  }
}

}  // namespace
}  // namespace ikbo::kernels
