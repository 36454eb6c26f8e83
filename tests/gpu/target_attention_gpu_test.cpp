// Target attention on the matrix unit against attention written out in float64 on the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/target_attention.h"

namespace ikbo::kernels {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  int candidates, users, seeds, length, q_heads, kv_heads, dim;
  bool packed;
};

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(values.size(), 1) * sizeof(T)),
              cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> read(size_t count) const {
    std::vector<T> values(count);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
};

template <typename T>
T narrow(double value) {
  return static_cast<T>(static_cast<float>(value));
}

template <typename T>
std::vector<T> random_values(size_t count, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) value = narrow<T>(normal(random));
  return values;
}

// Runs one case on fresh inputs, poisoned where nothing may be read, and compares every element.
template <typename T>
void check(const Case& c, ScalarType type, double tolerance) {
  std::mt19937 random(std::random_device{}());
  const int group = c.q_heads / c.kv_heads;
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<int32_t> index(static_cast<size_t>(c.candidates));
  for (int32_t& user : index) user = pick(0, c.users - 1);
  if (c.candidates > 3) index[3] = c.users;  // no such user
  std::vector<int32_t> lengths, offsets{2};
  for (int u = 0; u < c.users; ++u) {
    lengths.push_back(u == 0 ? 0 : (u == 1 ? c.length : pick(0, c.length)));
    offsets.push_back(offsets.back() + lengths.back());
  }
  const int64_t rows = c.packed ? offsets.back() + 3 : int64_t{c.users} * c.length;
  const int64_t row_size = int64_t{c.kv_heads} * c.dim;
  auto q = random_values<T>(static_cast<size_t>(c.candidates) * c.seeds * c.q_heads * c.dim, random);
  auto k = random_values<T>(static_cast<size_t>(rows * row_size), random);
  auto v = random_values<T>(static_cast<size_t>(rows * row_size), random);
  const auto first_row = [&](int u) { return c.packed ? offsets[u] : int64_t{u} * c.length; };
  std::vector<bool> used(static_cast<size_t>(rows));
  for (int u = 0; u < c.users; ++u) {
    for (int i = 0; i < lengths[u]; ++i) used[first_row(u) + i] = true;
  }
  for (int64_t at = 0; at < rows * row_size; ++at) {
    if (!used[at / row_size]) k[at] = v[at] = narrow<T>(kNaN);
  }

  const DeviceArray<T> q_device(q), k_device(k), v_device(v);
  const DeviceArray<int32_t> index_device(index), lengths_device(lengths), offsets_device(offsets);
  const DeviceArray<T> out_device(std::vector<T>(q.size(), narrow<T>(-77)));
  const size_t sums = q.size() / c.dim;
  const DeviceArray<float> lse_device(std::vector<float>(sums, -77));
  TargetAttentionProblem p;
  p.type = type;
  p.candidates = c.candidates;
  p.seeds = c.seeds;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.dim;
  p.users = c.users;
  p.length = c.packed ? rows : c.length;
  p.scale = 1 / std::sqrt(c.dim);
  p.q = q_device.get();
  p.q_candidate_stride = int64_t{c.seeds} * c.q_heads * c.dim;
  p.q_seed_stride = int64_t{c.q_heads} * c.dim;
  p.q_head_stride = c.dim;
  p.k = k_device.get();
  p.v = v_device.get();
  p.k_user_stride = p.v_user_stride = c.packed ? 0 : c.length * row_size;
  p.k_row_stride = p.v_row_stride = row_size;
  p.k_head_stride = p.v_head_stride = c.dim;
  p.candidate_to_user = index_device.get();
  p.kv_lengths = c.packed ? nullptr : lengths_device.get();
  p.kv_offsets = c.packed ? offsets_device.get() : nullptr;
  p.out = out_device.get();
  p.logsumexp = lse_device.get();
  ASSERT_TRUE(target_attention_supported(p));
  const size_t bytes = target_attention_workspace_bytes(p);
  const DeviceArray<char> workspace(std::vector<char>(bytes, 0x55));
  for (int run = 0; run < 2; ++run) target_attention(p, workspace.get(), bytes, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const auto out = out_device.read(q.size());
  const auto lse = lse_device.read(sums);
  std::vector<double> weights;
  for (size_t at = 0; at < sums; ++at) {
    const int head = static_cast<int>(at) % c.q_heads / group;
    const int user = index[at / c.q_heads / c.seeds];
    const bool known = user < c.users;
    const int length = known ? lengths[user] : 0;
    weights.assign(length, 0);
    double highest = -std::numeric_limits<double>::infinity();
    const auto history = [&](const std::vector<T>& all, int i, int d) {
      return static_cast<double>(static_cast<float>(all[(first_row(user) + i) * row_size + head * c.dim + d]));
    };
    for (int i = 0; i < length; ++i) {
      for (int d = 0; d < c.dim; ++d) weights[i] += static_cast<float>(q[at * c.dim + d]) * history(k, i, d) * p.scale;
      highest = std::max(highest, weights[i]);
    }
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - highest);
    for (int d = 0; d < c.dim; ++d) {
      double expected = known ? 0 : kNaN;
      for (int i = 0; i < length; ++i) expected += weights[i] / total * history(v, i, d);
      const double found = static_cast<float>(out[at * c.dim + d]);
      if (!known) {
        ASSERT_TRUE(std::isnan(found)) << at << " " << d;
      } else {
        ASSERT_NEAR(found, expected, tolerance * std::max(1.0, std::abs(expected))) << at << " " << d;
      }
    }
    if (!known) {
      ASSERT_TRUE(std::isnan(lse[at]));
    } else if (length == 0) {
      ASSERT_EQ(lse[at], -std::numeric_limits<float>::infinity());
    } else {
      ASSERT_NEAR(lse[at], highest + std::log(total), 1e-5 * std::max(1.0, std::abs(highest)));
    }
  }
}

class TargetAttentionSmall : public ::testing::TestWithParam<Case> {};

TEST_P(TargetAttentionSmall, AgreesWithFloat64) {
  check<__nv_bfloat16>(GetParam(), ScalarType::kBFloat16, 0x1p-7);
  check<__half>(GetParam(), ScalarType::kFloat16, 0x1p-10);
  check<float>(GetParam(), ScalarType::kFloat32, 4e-6);
}

INSTANTIATE_TEST_SUITE_P(Shapes, TargetAttentionSmall,
                         ::testing::Values(Case{1, 1, 1, 1, 1, 1, 8, false},       // all ones
                                           Case{9, 3, 7, 70, 2, 2, 64, false},     // part of a block
                                           Case{9, 3, 7, 300, 4, 2, 128, false},   // several blocks, grouped heads
                                           Case{9, 3, 7, 300, 4, 1, 128, true},    // packed
                                           Case{5, 2, 64, 129, 1, 1, 256, false},  // one key in the last block
                                           Case{3, 40, 5, 65, 2, 2, 40, true},     // more users than candidates
                                           Case{70, 2, 3, 128, 2, 1, 96, false},   // whole blocks
                                           Case{6, 2, 100, 257, 1, 1, 200, true},  // candidates across tiles
                                           Case{7, 3, 20, 150, 2, 1, 32, true}));  // two tiles of fp32's in one

TEST(TargetAttention, OneCtaSetsUpSomeCandidatesOfAnyNumberOfUsers) {
  check<__nv_bfloat16>({16'000, 1, 1, 20, 2, 2, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({3'000, 2'047, 1, 5, 1, 1, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({3'000, 2'048, 2, 5, 1, 1, 8, true}, ScalarType::kBFloat16, 0x1p-7);
  check<float>({2'000, 3'000, 3, 5, 2, 1, 9, true}, ScalarType::kFloat32, 4e-6);
}

TEST(TargetAttention, ManyCandidatesAreSetUpByManyCtas) {
  check<__nv_bfloat16>({20'000, 300, 1, 20, 1, 1, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({17'000, 5'000, 2, 3, 2, 1, 8, true}, ScalarType::kBFloat16, 0x1p-7);
}

TEST(TargetAttention, WhatTheCopyEngineCannotAddressIsNotSupported) {
  TargetAttentionProblem p;
  p.candidates = p.seeds = p.q_heads = p.kv_heads = p.users = 2;
  p.length = 4;
  p.head_dim = 12;
  p.scale = 1;
  p.q_candidate_stride = 48, p.q_seed_stride = 24, p.q_head_stride = 12;
  p.k_user_stride = p.v_user_stride = 96, p.k_row_stride = p.v_row_stride = 24, p.k_head_stride = p.v_head_stride = 12;
  EXPECT_FALSE(target_attention_supported(p));
  p.q_head_stride = p.k_head_stride = p.v_head_stride = 16;
  EXPECT_TRUE(target_attention_supported(p));
  p.scale = -1;
  EXPECT_FALSE(target_attention_supported(p));
  EXPECT_THROW(target_attention(p, nullptr, 0, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace ikbo::kernels
