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

TEST(LinearCompressionConfig, SmallBroadcastTilesWhereEachClusterHasAtMostOneTile) {
  for (const int64_t batch : {4, 10, 20}) {
    const auto config = choose_linear_compression_config(main_shape(batch), kMultiprocessors);
    EXPECT_EQ(config.broadcast_blocks, 1) << batch;
    const int64_t broadcast_tiles = (4 + config.cluster - 1) / config.cluster;
    const int64_t candidate_tiles = (batch * 4 + 2 * config.cluster - 1) / (2 * config.cluster);
    const int64_t m_tiles = (433 + config.block_m - 1) / config.block_m;
    EXPECT_EQ(config.ctas, (broadcast_tiles + candidate_tiles) * m_tiles * config.cluster) << batch;
  }
  for (const int64_t batch : {64, 1024}) {
    for (const auto& config : legal_linear_compression_configs(main_shape(batch), kMultiprocessors)) {
      EXPECT_EQ(config.broadcast_blocks, 2) << batch;
    }
  }
  for (const auto& config : legal_linear_compression_configs({4, 433, 256, 866, {}, {}}, kMultiprocessors)) {
    EXPECT_EQ(config.broadcast_blocks, 2);
  }
}

// What was the fastest of all configurations on an H200.
TEST(LinearCompressionConfig, TheChoiceIsTheOneMeasuredToBeFastest) {
  struct Measured {
    LinearCompressionShape shape;
    int block_m;
    int broadcast_blocks;
  };
  for (const auto& [shape, block_m, broadcast_blocks] : std::vector<Measured>{
           {main_shape(4), 64, 1},
           {main_shape(10), 96, 1},
           {main_shape(20), 152, 1},
           {main_shape(32), 152, 2},
           {main_shape(128), 152, 2},
           {main_shape(1024), 152, 2},
           {{16, 256, 128, 866, {1}, {1178}}, 64, 1},
           {{64, 256, 256, 400, {1}, {600}}, 128, 2},
           {{256, 200, 192, 866, {4}, {1178}}, 128, 2},
           {{8, 800, 64, 866, {1}, {2000}}, 64, 1},
       }) {
    const auto config = choose_linear_compression_config(shape, kMultiprocessors);
    EXPECT_EQ(config.block_m, block_m) << "B " << shape.batch << " M " << shape.m;
    EXPECT_EQ(config.cluster, 2) << "B " << shape.batch << " M " << shape.m;
    EXPECT_EQ(config.broadcast_blocks, broadcast_blocks) << "B " << shape.batch << " M " << shape.m;
  }
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
