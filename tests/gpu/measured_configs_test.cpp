// Which measured configuration serves a shape, without a GPU.
#include "kernels/measured_configs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace ikbo::kernels {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200, for these tests alone
const MeasuredShape kShape{ScalarType::kBFloat16, 433, 256, 866, {1178}};

LinearCompressionShape at(int64_t batch, int64_t users) {
  return {batch, kShape.m, kShape.n, kShape.k_candidate, {users}, kShape.k_broadcast};
}

MeasuredConfigs with(const std::vector<MeasuredPoint>& points) {
  MeasuredConfigs configs(kMultiprocessors);
  configs.add(kShape, points);
  return configs;
}

// The tile height that serves the batches; 0 where the model chooses.
int block_at(const MeasuredConfigs& configs, int64_t batch, int64_t users) {
  const auto config = configs.find(at(batch, users), kShape.type);
  return config ? config->block_m : 0;
}

std::string refusal(const MeasuredShape& shape, const MeasuredPoint& point) {
  MeasuredConfigs configs(kMultiprocessors);
  try {
    configs.add(shape, {point});
  } catch (const std::invalid_argument& error) {
    EXPECT_FALSE(configs.find(at(1024, 15), kShape.type));
    return error.what();
  }
  return "";
}

TEST(MeasuredConfigs, TheNearestPointByLogarithms) {
  const auto configs = with({{64, {1}, 64, 1}, {1024, {15}, 152, 2}, {256, {4}, 96, 2}});
  EXPECT_EQ(block_at(configs, 64, 1), 64);
  EXPECT_EQ(block_at(configs, 127, 2), 64);  // 2 to 64, just over 2 to 256: not the nearest by difference
  EXPECT_EQ(block_at(configs, 129, 2), 96);
  EXPECT_EQ(block_at(configs, 511, 7), 96);
  EXPECT_EQ(block_at(configs, 513, 8), 152);
  EXPECT_EQ(block_at(configs, 1050, 15), 152);
}

TEST(MeasuredConfigs, RowsOfTermsCountToo) {
  const auto configs = with({{1024, {1}, 64, 1}, {1024, {1024}, 152, 2}});
  EXPECT_EQ(block_at(configs, 1000, 8), 64);
  EXPECT_EQ(block_at(configs, 1000, 100), 152);
  EXPECT_EQ(block_at(configs, 1000, 0), 64);
}

TEST(MeasuredConfigs, APointSaysNothingOfBatchesThatAreFar) {
  const auto configs = with({{256, {4}, 96, 2}});
  EXPECT_EQ(block_at(configs, 64, 1), 96);
  EXPECT_EQ(block_at(configs, 63, 1), 0);
  EXPECT_EQ(block_at(configs, 1024, 15), 96);
  EXPECT_EQ(block_at(configs, 1025, 15), 0);
  // Where a near point is further away in rows than a far one, the far one still does not count.
  const auto two = with({{256, {256}, 96, 2}, {2048, {1}, 64, 1}});
  EXPECT_EQ(block_at(two, 300, 1), 96);
}

TEST(MeasuredConfigs, TheConfigurationIsSizedForTheBatchThatItServes) {
  const auto configs = with({{256, {4}, 96, 2}});
  for (const int64_t batch : {64, 256, 1000}) {
    const auto config = configs.find(at(batch, 4), kShape.type);
    ASSERT_TRUE(config);
    bool legal = false;
    for (const auto& one : legal_linear_compression_configs(at(batch, 4), kMultiprocessors)) {
      legal = legal || one == *config;
    }
    EXPECT_TRUE(legal) << batch;
  }
}

TEST(MeasuredConfigs, OneIsMeasuredForEachHeightAndClusterAndTheModelsChoiceIsAmongThem) {
  for (const int64_t batch : {4, 64, 1024}) {
    const LinearCompressionShape shape = at(batch, 1);
    const auto configs = measurable_linear_compression_configs(shape, kMultiprocessors);
    EXPECT_EQ(configs.size(), 2 * linear_compression_block_sizes().size());
    std::set<std::pair<int, int>> forms;
    for (const auto& config : configs) forms.insert({config.block_m, config.cluster});
    EXPECT_EQ(forms.size(), configs.size());
    const auto chosen = choose_linear_compression_config(shape, kMultiprocessors);
    EXPECT_NE(std::find(configs.begin(), configs.end(), chosen), configs.end());
  }
}

TEST(MeasuredConfigs, AnyOtherSizeOrTypeIsTheModels) {
  const auto configs = with({{256, {4}, 96, 2}});
  EXPECT_FALSE(configs.find(at(256, 4), ScalarType::kFloat16));
  for (auto change : {&LinearCompressionShape::m, &LinearCompressionShape::n, &LinearCompressionShape::k_candidate}) {
    LinearCompressionShape shape = at(256, 4);
    shape.*change += 1;
    EXPECT_FALSE(configs.find(shape, kShape.type));
  }
  LinearCompressionShape shape = at(256, 4);
  shape.k_broadcast = {1177};
  EXPECT_FALSE(configs.find(shape, kShape.type));
  shape = at(256, 4);
  shape.k_broadcast.push_back(3);
  shape.rows_broadcast.push_back(2);
  EXPECT_FALSE(configs.find(shape, kShape.type));
}

TEST(MeasuredConfigs, TheLastMeasurementOfAPointCountsAndOthersStay) {
  MeasuredConfigs configs = with({{256, {4}, 96, 2}, {1024, {15}, 152, 2}});
  configs.add(kShape, {{256, {4}, 64, 1}});
  MeasuredShape other = kShape;
  other.m = 100;
  configs.add(other, {{256, {4}, 144, 1}});
  EXPECT_EQ(block_at(configs, 256, 4), 64);
  EXPECT_EQ(block_at(configs, 1024, 15), 152);
  EXPECT_EQ(configs.find({256, 100, 256, 866, {4}, {1178}}, kShape.type)->block_m, 144);
}

TEST(MeasuredConfigs, TheOrderInWhichPointsComeChangesNothing) {
  const MeasuredPoint low{128, {4}, 64, 1}, high{512, {4}, 152, 2};
  EXPECT_EQ(block_at(with({low, high}), 256, 4), 64);  // equally far from both
  EXPECT_EQ(block_at(with({high, low}), 256, 4), 64);
}

TEST(MeasuredConfigs, WithoutBroadcastTerms) {
  MeasuredConfigs configs(kMultiprocessors);
  configs.add({ScalarType::kFloat16, 8, 64, 8, {}}, {{16, {}, 64, 1}});
  EXPECT_TRUE(configs.find({20, 8, 64, 8, {}, {}}, ScalarType::kFloat16));
}

TEST(MeasuredConfigs, WhatIsIllegalIsRefusedAndNamed) {
  EXPECT_NE(refusal(kShape, {1024, {15}, 65, 1}).find("no kernel for block_m 65 with cluster 1; tile heights are 64"),
            std::string::npos);
  EXPECT_NE(refusal(kShape, {1024, {15}, 64, 3}).find("block_m 64 with cluster 3"), std::string::npos);
  EXPECT_NE(refusal(kShape, {1024, {15}, 64, 0}).find("cluster 0"), std::string::npos);
  EXPECT_NE(refusal(kShape, {1024, {15}, 0, 1}).find("block_m 0"), std::string::npos);
  EXPECT_NE(refusal(kShape, {0, {15}, 64, 1}).find("batch must be positive"), std::string::npos);
  EXPECT_NE(refusal(kShape, {1024, {-1}, 64, 1}).find("rows cannot be negative"), std::string::npos);
  EXPECT_NE(refusal(kShape, {1024, {}, 64, 1}).find("0 numbers of rows for 1 broadcast terms"), std::string::npos);
  MeasuredShape shape = kShape;
  shape.type = ScalarType::kFloat32;
  EXPECT_NE(refusal(shape, {1024, {15}, 64, 1}).find("float16 or bfloat16"), std::string::npos);
  shape = kShape;
  shape.n = 0;
  EXPECT_NE(refusal(shape, {1024, {15}, 64, 1}).find("m and n must be positive"), std::string::npos);
}

TEST(MeasuredConfigs, OneIllegalPointKeepsAllOfThemOut) {
  MeasuredConfigs configs(kMultiprocessors);
  EXPECT_THROW(configs.add(kShape, {{256, {4}, 96, 2}, {1024, {15}, 65, 1}}), std::invalid_argument);
  EXPECT_EQ(block_at(configs, 256, 4), 0);
}

}  // namespace
}  // namespace ikbo::kernels
