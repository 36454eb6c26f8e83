// Linear compression on a Hopper GPU against float64, and everything that must not depend on chance: other work in the
// batch, what the workspace held, how many CTAs are resident, replays.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>

#include "kernels/linear_compression_reference.h"
#include "tests/gpu/lce_inputs.h"

namespace ikbo::kernels {
namespace {

using ikbo::testing::check;
using ikbo::testing::Comparison;
using ikbo::testing::DeviceBuffer;
using ikbo::testing::LceInputs;
using ikbo::testing::LceSize;

constexpr ScalarType kHalf = ScalarType::kFloat16;
constexpr ScalarType kBfloat = ScalarType::kBFloat16;
constexpr ScalarType kFloat = ScalarType::kFloat32;

std::string name_of(const LceSize& size, const LinearCompressionConfig& config) {
  std::string text = "B " + std::to_string(size.batch) + " M " + std::to_string(size.m) + " N " +
                     std::to_string(size.n) + " K " + std::to_string(size.k_candidate);
  for (const auto& term : size.broadcast) {
    text += " + " + std::to_string(term.rows) + " rows of K " + std::to_string(term.k);
  }
  text += " gap " + std::to_string(size.e_gap) + " shift " + std::to_string(size.shift) +
          (size.align_w ? " aligned W" : "") + (size.align_e ? " aligned E" : "");
  return text + (size.type == kHalf ? " fp16" : " bf16") + (size.out_type == kFloat ? " to fp32" : "") + ", block " +
         std::to_string(config.block_m) + " cluster " + std::to_string(config.cluster) + " ctas " +
         std::to_string(config.ctas) + " broadcast blocks " + std::to_string(config.broadcast_blocks);
}

// Workspace full of 0xff, so that nothing can rely on zeros.
void run(const LceInputs& inputs, const LinearCompressionConfig& config, LinearCompressionStage stage) {
  const size_t bytes = linear_compression_workspace_bytes(inputs.problem(), config);
  DeviceBuffer workspace(bytes);
  check(cudaMemset(workspace.as(), 0xff, bytes), "cudaMemset");
  linear_compression(inputs.problem(), config, workspace.as(), bytes, stage, nullptr);
  check(cudaDeviceSynchronize(), "linear_compression");
}

Comparison compared(const LceInputs& inputs) {
  const auto& problem = inputs.problem();
  DeviceBuffer reference(problem.batch * problem.m * problem.n * sizeof(double));
  linear_compression_reference(problem, reference.as<double>(), nullptr);
  return ikbo::testing::compare(problem, reference.as<double>());
}

void expect_correct(LceInputs& inputs, const LceSize& size, const LinearCompressionConfig& config,
                    LinearCompressionStage stage) {
  SCOPED_TRACE(name_of(size, config) + (stage == LinearCompressionStage::kFusedWs ? " fused_ws" : " fused"));
  inputs.poison_out();
  run(inputs, config, stage);
  const Comparison comparison = compared(inputs);
  EXPECT_EQ(comparison.wrong_nans, 0);
  EXPECT_EQ(comparison.outside, 0) << "largest error " << comparison.largest;
  EXPECT_NO_THROW(inputs.download_out());
}

uint64_t fresh_seed() {
  static std::mt19937_64 random(std::random_device{}());
  return random() >> 16;
}

LinearCompressionConfig chosen(const LceInputs& inputs) {
  return choose_linear_compression_config(inputs.problem());
}

const std::vector<LceSize>& small_sizes() {
  static const std::vector<LceSize> sizes = {
      {1, 1, 1, 1, {{1, 1}}},
      {3, 64, 64, 64, {{2, 64}}},
      {5, 65, 40, 17, {{2, 33}}},
      {4, 100, 72, 129, {{9, 15}}},  // more users than candidates
      {6, 130, 100, 70, {{3, 50}}},  // N no multiple of 8
      {2, 33, 257, 31, {{1, 100}}},
      {3, 24, 8, 200, {}},         // no broadcast term
      {4, 80, 192, 0, {{2, 48}}},  // nothing of the candidates' own
      {4, 80, 128, 48, {{2, 0}}},
      {4, 72, 64, 40, {{0, 40}}},              // no users: every index is wrong
      {9, 96, 136, 100, {{4, 60}, {2, 130}}},  // user and vendor
      {9, 48, 56, 66, {{4, 60}, {3, 20}, {2, 5}, {1, 64}}},
  };
  return sizes;
}

TEST(LinearCompressionSmall, MatchesFloat64) {
  for (LceSize size : small_sizes()) {
    for (const ScalarType type : {kHalf, kBfloat}) {
      for (const bool to_float : {false, true}) {
        size.type = type;
        size.out_type = to_float ? kFloat : type;
        LceInputs inputs(size, fresh_seed());
        for (const auto stage : {LinearCompressionStage::kFused, LinearCompressionStage::kFusedWs}) {
          expect_correct(inputs, size, chosen(inputs), stage);
        }
      }
    }
  }
}

TEST(LinearCompression, EveryConfigurationMatchesFloat64AndAllAgreeBitForBit) {
  for (LceSize size : std::vector<LceSize>{
           {5, 433, 256, 866, {{2, 1178}}}, {37, 300, 120, 200, {{5, 333}}}, {9, 331, 131, 70, {{3, 90}}}}) {
    for (const ScalarType type : {kHalf, kBfloat}) {
      size.type = size.out_type = type;
      LceInputs inputs(size, fresh_seed());
      std::vector<uint8_t> first;
      for (LinearCompressionConfig config : legal_linear_compression_configs(shape_of(inputs.problem()), 132)) {
        for (const int ctas : {config.ctas, config.cluster, 64}) {
          config.ctas = ctas;
          expect_correct(inputs, size, config, LinearCompressionStage::kFusedWs);
          const auto bytes = inputs.download_out();
          if (first.empty()) {
            first = bytes;
          }
          EXPECT_TRUE(bytes == first) << name_of(size, config);
        }
      }
    }
  }
}

TEST(LinearCompression, OddShapesMatchFloat64) {
  const std::vector<LceSize> sizes = {
      {1024, 433, 256, 866, {{15, 1178}}}, {10, 433, 256, 866, {{1, 1178}}},  {64, 433, 256, 866, {{64, 1178}}},
      {20, 433, 256, 866, {{100, 1178}}},  {33, 1024, 512, 300, {{3, 4096}}}, {50, 64, 64, 4096, {{7, 100}}},
      {129, 257, 88, 511, {{11, 129}}},    {31, 433, 250, 866, {{3, 1178}}},  {16, 999, 333, 777, {{4, 555}}},
      {33, 100, 65, 7, {{5, 9}}},          {17, 80, 127, 131, {{17, 1}}},     {9, 72, 100, 64, {{2, 3}, {4, 66}}},
      {12, 433, 68, 866, {{3, 1178}}},     {12, 90, 66, 200, {{1, 8}}},
  };
  for (LceSize size : sizes) {
    for (const ScalarType type : {kHalf, kBfloat}) {
      for (const bool align_w : {true, false}) {
        for (const bool align_e : {true, false}) {
          size.type = size.out_type = type;
          size.align_w = align_w;
          size.align_e = align_e;
          LceInputs inputs(size, fresh_seed());
          expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFusedWs);
        }
      }
    }
  }
}

// Every distance between rows, every place of 16 bytes to begin at, sizes around those of blocks and strands.
TEST(LinearCompressionSmall, RowsThatBeginAnywhereMatchFloat64) {
  std::mt19937_64 random(fresh_seed());
  const auto one_of = [&random](const std::vector<int64_t>& values) { return values[random() % values.size()]; };
  for (int i = 0; i < 48; ++i) {
    LceSize size{one_of({1, 2, 3, 5}),
                 one_of({1, 3, 7, 8, 9, 15, 65, 130, 161}),
                 one_of({9, 63, 64, 65, 66, 68, 70, 72, 100, 121, 127, 129, 191}),
                 one_of({1, 3, 7, 8, 9, 15, 63, 64, 65, 67, 129, 130, 132}),
                 {{one_of({1, 2, 3}), one_of({1, 5, 8, 9, 64, 70, 131})}}};
    size.type = size.out_type = i % 2 == 0 ? kHalf : kBfloat;
    if (i % 8 == 7) size.out_type = kFloat;
    size.e_gap = one_of({0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8});
    size.shift = static_cast<int64_t>(random() % 8);
    size.align_w = random() % 2 == 0;
    size.align_e = random() % 4 == 0;
    LceInputs inputs(size, fresh_seed());
    expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFusedWs);
    const auto bytes = inputs.download_out();
    expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFused);
    EXPECT_TRUE(bytes == inputs.download_out()) << name_of(size, chosen(inputs));
  }
}

TEST(LinearCompressionSmall, AWrongIndexGivesNanForItsCandidateAlone) {
  LceSize size{8, 70, 96, 90, {{3, 40}, {2, 24}}};
  LceInputs inputs(size, fresh_seed());
  inputs.index(0)[2] = -1;
  inputs.index(0)[5] = 3;
  inputs.index(1)[6] = 2'000'000'000;
  inputs.upload_index(0);
  inputs.upload_index(1);
  expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFusedWs);
  EXPECT_EQ(compared(inputs).nans, 3 * size.m * size.n);
}

TEST(LinearCompressionSmall, NanOfOneCandidateOrUserReachesNoOther) {
  for (const int64_t n : {96, 98, 101}) {
    LceSize size{9, 70, n, 90, {{4, 43}}};
    LceInputs inputs(size, fresh_seed());
    inputs.index(0) = {0, 0, 1, 1, 1, 3, 3, 0, 0};  // user 2 has no candidates
    inputs.upload_index(0);
    inputs.fill_row_with_nan(-1, 4);
    inputs.fill_row_with_nan(0, 2);
    inputs.fill_row_with_nan(0, 3);
    expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFusedWs);
    EXPECT_EQ(compared(inputs).nans, 3 * size.m * size.n);
  }
}

TEST(LinearCompression, ACandidateAloneGivesTheSameBits) {
  for (const int64_t n : {256, 250, 255}) {
    LceSize size{70, 433, n, 866, {{5, 1178}}};
    LceInputs inputs(size, fresh_seed());
    run(inputs, chosen(inputs), LinearCompressionStage::kFusedWs);
    const auto all = inputs.download_out();
    LinearCompressionProblem alone = inputs.problem();
    const int64_t candidate = 41;
    const int64_t out_bytes = size.m * size.n * 2;
    alone.batch = alone.candidate.rows = 1;
    alone.candidate.e = static_cast<const uint16_t*>(alone.candidate.e) + candidate * alone.candidate.e_batch_stride;
    alone.broadcast[0].index += candidate;
    const auto config = choose_linear_compression_config(alone);
    DeviceBuffer workspace(linear_compression_workspace_bytes(alone, config));
    linear_compression(alone, config, workspace.as(), workspace.bytes(), LinearCompressionStage::kFusedWs, nullptr);
    check(cudaDeviceSynchronize(), "linear_compression");
    const auto one = inputs.download_out();
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + out_bytes, all.begin() + candidate * out_bytes));
  }
}

TEST(LinearCompression, AThousandLaunchesOnChangingShapesShareAWorkspace) {
  std::mt19937_64 random(fresh_seed());
  std::vector<std::unique_ptr<LceInputs>> inputs;
  std::vector<std::vector<uint8_t>> expected;
  size_t bytes = 0;
  for (int i = 0; i < 25; ++i) {
    LceSize size{static_cast<int64_t>(1 + random() % 60),
                 static_cast<int64_t>(1 + random() % 500),
                 i % 2 == 0 ? static_cast<int64_t>(8 * (1 + random() % 32)) : static_cast<int64_t>(1 + random() % 256),
                 static_cast<int64_t>(1 + random() % 400),
                 {{static_cast<int64_t>(1 + random() % 20), static_cast<int64_t>(1 + random() % 400)}}};
    inputs.push_back(std::make_unique<LceInputs>(size, random() >> 16));
    run(*inputs.back(), chosen(*inputs.back()), LinearCompressionStage::kFused);
    expected.push_back(inputs.back()->download_out());
    bytes = std::max(bytes, linear_compression_workspace_bytes(inputs.back()->problem(), chosen(*inputs.back())));
  }
  DeviceBuffer workspace(bytes);
  check(cudaMemset(workspace.as(), 0x5a, bytes), "cudaMemset");
  for (int launch = 0; launch < 1000; ++launch) {
    const size_t i = random() % inputs.size();
    inputs[i]->poison_out();
    LinearCompressionConfig config = chosen(*inputs[i]);
    const auto configs = legal_linear_compression_configs(shape_of(inputs[i]->problem()), 132);
    if (launch % 2 == 1) {
      config = configs[random() % configs.size()];
    }
    DeviceBuffer larger(linear_compression_workspace_bytes(inputs[i]->problem(), config));
    DeviceBuffer& used = larger.bytes() > bytes ? larger : workspace;
    linear_compression(inputs[i]->problem(), config, used.as(), used.bytes(), LinearCompressionStage::kFusedWs,
                       nullptr);
    ASSERT_TRUE(inputs[i]->download_out() == expected[i]) << "launch " << launch;
  }
}

// The driver knows no context in a thread that has not used the GPU yet.
TEST(LinearCompression, AThreadThatHasNotUsedTheGpuLaunches) {
  LceSize size{50, 200, 128, 300, {{6, 150}}};
  LceInputs inputs(size, fresh_seed());
  const auto config = chosen(inputs);
  run(inputs, config, LinearCompressionStage::kFused);
  const auto expected = inputs.download_out();
  inputs.poison_out();
  DeviceBuffer workspace(linear_compression_workspace_bytes(inputs.problem(), config));
  std::string problem;
  std::thread([&] {
    try {
      linear_compression(inputs.problem(), config, workspace.as(), workspace.bytes(), LinearCompressionStage::kFusedWs,
                         nullptr);
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }).join();
  EXPECT_EQ(problem, "");
  EXPECT_TRUE(inputs.download_out() == expected);
}

TEST(LinearCompression, AGraphReplayFollowsTheMapping) {
  LceSize size{50, 200, 128, 300, {{6, 150}}};
  LceInputs inputs(size, fresh_seed());
  const auto config = chosen(inputs);
  DeviceBuffer workspace(linear_compression_workspace_bytes(inputs.problem(), config));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < 3; ++i) {
    // Behind something that is no kernel, and behind another launch: it must wait for both.
    check(cudaMemsetAsync(workspace.as(), 0xff, workspace.bytes(), stream), "cudaMemsetAsync");
    for (int j = 0; j < 2; ++j) {
      linear_compression(inputs.problem(), config, workspace.as(), workspace.bytes(), LinearCompressionStage::kFusedWs,
                         stream);
    }
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  std::mt19937_64 random(fresh_seed());
  for (int replay = 0; replay < 50; ++replay) {
    for (int32_t& row : inputs.index(0)) {
      row = static_cast<int32_t>(random() % 6);
    }
    inputs.upload_index(0, stream);
    inputs.poison_out(stream);
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "replay");
    const auto replayed = inputs.download_out();
    run(inputs, config, LinearCompressionStage::kFused);
    ASSERT_TRUE(replayed == inputs.download_out()) << "replay " << replay;
  }
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST(LinearCompression, FewerResidentCtasThanLaunchedFinish) {
  LceSize size{40, 433, 256, 200, {{20, 300}}};
  LceInputs inputs(size, fresh_seed());
  for (LinearCompressionConfig config : {LinearCompressionConfig{152, 2, 1000}, LinearCompressionConfig{64, 1, 999}}) {
    expect_correct(inputs, size, config, LinearCompressionStage::kFusedWs);
  }
  // Two launches at a time, each with less than the device to itself.
  const LinearCompressionConfig config{152, 2, 132};
  LceInputs other(size, fresh_seed());
  const size_t bytes = linear_compression_workspace_bytes(inputs.problem(), config);
  DeviceBuffer workspaces(2 * (bytes + 256));
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  check(cudaDeviceSynchronize(), "inputs");
  for (int i = 0; i < 200; ++i) {
    linear_compression(inputs.problem(), config, workspaces.as<uint8_t>(), bytes, LinearCompressionStage::kFusedWs,
                       streams[0]);
    linear_compression(other.problem(), config, workspaces.as<uint8_t>() + bytes, bytes,
                       LinearCompressionStage::kFusedWs, streams[1]);
  }
  check(cudaDeviceSynchronize(), "two streams");
  for (LceInputs* which : {&inputs, &other}) {
    const Comparison comparison = compared(*which);
    EXPECT_EQ(comparison.wrong_nans + comparison.outside, 0);
  }
  for (cudaStream_t stream : streams) {
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
}

TEST(LinearCompression, MoreThanTwoToThe31Elements) {
  LceSize size{20'000, 433, 256, 32, {{40, 64}}};  // 2.2e9 outputs
  LceInputs inputs(size, fresh_seed());
  expect_correct(inputs, size, chosen(inputs), LinearCompressionStage::kFusedWs);
}

TEST(LinearCompressionSmall, RejectsBadArgumentsByName) {
  LceSize size{4, 16, 16, 16, {{2, 16}}};
  LceInputs inputs(size, 1);
  const auto config = chosen(inputs);
  DeviceBuffer workspace(linear_compression_workspace_bytes(inputs.problem(), config));
  const auto message = [&](const LinearCompressionProblem& problem, const LinearCompressionConfig& with, size_t bytes) {
    try {
      linear_compression(problem, with, workspace.as(), bytes, LinearCompressionStage::kFusedWs, nullptr);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  auto problem = inputs.problem();
  problem.candidate.w_row_stride = 3;
  EXPECT_NE(message(problem, config, workspace.bytes()).find("candidate.w_row_stride is 3"), std::string::npos);
  problem = inputs.problem();
  problem.broadcast[0].index = nullptr;
  EXPECT_NE(message(problem, config, workspace.bytes()).find("broadcast[0].index"), std::string::npos);
  EXPECT_NE(message(inputs.problem(), {65, 1, 1}, workspace.bytes()).find("block_m 65"), std::string::npos);
  EXPECT_NE(message(inputs.problem(), {64, 1, 1, 3}, workspace.bytes()).find("broadcast_blocks must be 1 or 2"),
            std::string::npos);
  EXPECT_NE(message(inputs.problem(), config, 256).find("workspace has 256 bytes"), std::string::npos);
}

}  // namespace
}  // namespace ikbo::kernels
