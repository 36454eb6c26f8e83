// The choice of a configuration, without a GPU.
#include "kernels/linear_compression_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

namespace ikbo::kernels {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200, for these tests alone

LinearCompressionShape main_shape(int64_t batch) {
  return {batch, 433, 256, 866, {(batch + 69) / 70}, {1178}};
}

TEST(LinearCompressionConfig, OffersEveryTileHeightWithEveryCluster) {
  const auto configs = legal_linear_compression_configs(main_shape(1024), kMultiprocessors);
  EXPECT_EQ(configs.size(), 2 * linear_compression_block_sizes().size());
  for (const auto& config : configs) {
    EXPECT_GT(config.ctas, 0);
    EXPECT_LE(config.ctas, kMultiprocessors);
    EXPECT_EQ(config.ctas % config.cluster, 0);
  }
}

TEST(LinearCompressionConfig, TheMainShapeWastesLittleOfM) {
  const auto config = choose_linear_compression_config(main_shape(1024), kMultiprocessors);
  const int computed = (433 + config.block_m - 1) / config.block_m * config.block_m;
  EXPECT_LE(computed, 456);
  EXPECT_GT(config.cluster, 1);
}

TEST(LinearCompressionConfig, ASmallBatchUsesMoreThanHalfOfTheMultiprocessors) {
  EXPECT_GT(choose_linear_compression_config(main_shape(10), kMultiprocessors).ctas, kMultiprocessors / 2);
}

TEST(LinearCompressionConfig, NeverMoreCtasThanTiles) {
  const auto config = choose_linear_compression_config({1, 8, 8, 8, {}, {}}, kMultiprocessors);
  EXPECT_EQ(config.ctas, config.cluster);
}

TEST(LinearCompressionConfig, OneMultiprocessorIsEnough) {
  EXPECT_EQ(choose_linear_compression_config(main_shape(1024), 1).ctas, 1);
}

TEST(LinearCompressionConfig, RejectsADeviceWithoutMultiprocessors) {
  EXPECT_THROW(choose_linear_compression_config(main_shape(1024), 0), std::invalid_argument);
}

TEST(LinearCompressionConfig, TheChoiceHasTheLowestModelledTime) {
  const auto shape = main_shape(512);
  const auto choice = choose_linear_compression_config(shape, kMultiprocessors);
  for (const auto& config : legal_linear_compression_configs(shape, kMultiprocessors)) {
    EXPECT_LE(modelled_cycles(shape, choice), modelled_cycles(shape, config));
  }
}

}  // namespace
}  // namespace ikbo::kernels
