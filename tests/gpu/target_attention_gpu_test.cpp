// Target attention on the matrix unit against attention written out in float64 on the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kernels/target_attention.h"

namespace ikbo::kernels {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  int candidates, users, seeds, length, q_heads, kv_heads, dim;
  bool packed;
  bool signs = false;  // whether whole runs of keys have negative logits, of other candidates the other runs
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

// A case's inputs, fresh and poisoned where nothing may be read.
template <typename T>
struct Inputs {
  Case c;
  std::vector<int32_t> index, lengths, offsets{2};
  int64_t rows;  // of all histories
  std::vector<T> q, k, v, q_self;

  explicit Inputs(const Case& of) : c(of), index(static_cast<size_t>(of.candidates)) {
    std::mt19937 random(std::random_device{}());
    const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    for (int32_t& user : index) user = pick(0, c.users - 1);
    if (c.candidates > 3) index[3] = c.users;  // no such user
    for (int u = 0; u < c.users; ++u) {
      lengths.push_back(u == 0 ? 0 : (u == 1 ? c.length : pick(0, c.length)));
      offsets.push_back(offsets.back() + lengths.back());
    }
    rows = c.packed ? offsets.back() + 3 : int64_t{c.users} * c.length;
    q = random_values<T>(static_cast<size_t>(c.candidates) * c.seeds * c.q_heads * c.dim, random);
    k = random_values<T>(static_cast<size_t>(rows * row_size()), random);
    v = random_values<T>(static_cast<size_t>(rows * row_size()), random);
    q_self = random_values<T>(static_cast<size_t>(rows * c.q_heads * c.dim), random);
    if (c.signs) give_signs();
    const std::vector<int> owner = owners();
    const auto poison = [&](std::vector<T>& values, int64_t size, int64_t head) {
      for (size_t at = 0; at < values.size(); ++at) {
        if (owner[at / size] < 0 || at % head >= static_cast<size_t>(c.dim)) values[at] = narrow<T>(kNaN);
      }
    };
    poison(k, row_size(), head_size());
    poison(v, row_size(), head_size());
    poison(q_self, int64_t{c.q_heads} * c.dim, c.dim);
  }

  // Heads of keys and values begin at multiples of 8 elements; queries are dense.
  int64_t head_size() const { return (c.dim + 7) / 8 * 8; }
  int64_t row_size() const { return int64_t{c.kv_heads} * head_size(); }

  void give_signs() {
    constexpr int64_t kRun = 100;  // rows: no multiple of a block
    const auto with_sign = [](T value, bool negative) {
      const double size = std::abs(static_cast<double>(static_cast<float>(value)));
      return narrow<T>(negative ? -size : size);
    };
    const int64_t of_candidate = int64_t{c.seeds} * c.q_heads * c.dim;
    for (size_t at = 0; at < q.size(); ++at) q[at] = with_sign(q[at], at / of_candidate % 2 != 0);
    for (size_t at = 0; at < k.size(); ++at) k[at] = with_sign(k[at], at / row_size() / kRun % 2 != 0);
  }

  int64_t first_row(int u) const { return c.packed ? offsets[u] : int64_t{u} * c.length; }

  // The user of each row of the histories, or -1.
  std::vector<int> owners() const {
    std::vector<int> owner(static_cast<size_t>(rows), -1);
    for (int u = 0; u < c.users; ++u) {
      for (int i = 0; i < lengths[u]; ++i) owner[first_row(u) + i] = u;
    }
    return owner;
  }

  // A query's result in float64: of user `user`, or of none, whose rows have NaN.
  struct Expected {
    std::vector<double> out;
    double logsumexp;
  };
  Expected attend(const T* query, int q_head, int user) const {
    const int head = q_head / (c.q_heads / c.kv_heads);
    const bool known = user >= 0 && user < c.users;
    std::vector<double> weights(static_cast<size_t>(known ? lengths[user] : 0));
    double highest = -std::numeric_limits<double>::infinity();
    const auto history = [&](const std::vector<T>& all, size_t i, int d) {
      return static_cast<double>(static_cast<float>(all[(first_row(user) + i) * row_size() + head * head_size() + d]));
    };
    for (size_t i = 0; i < weights.size(); ++i) {
      for (int d = 0; d < c.dim; ++d) weights[i] += static_cast<float>(query[d]) * history(k, i, d) / std::sqrt(c.dim);
      highest = std::max(highest, weights[i]);
    }
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - highest);
    Expected expected{std::vector<double>(static_cast<size_t>(c.dim), known ? 0 : kNaN),
                      known ? highest + std::log(total) : kNaN};
    for (int d = 0; d < c.dim; ++d) {
      for (size_t i = 0; i < weights.size(); ++i) expected.out[d] += weights[i] / total * history(v, i, d);
    }
    return expected;
  }
};

// Where rows of queries and results lie, in elements.
struct Layout {
  int front;      // of NaN before the first row of queries
  int gap;        // of NaN between rows of queries; behind the last there are none
  int out_front;  // before the first row of results, which nobody writes
};

template <typename T>
std::vector<T> laid_out(const std::vector<T>& rows, int dim, const Layout& layout) {
  const size_t count = rows.size() / dim;
  if (count == 0) return {};
  std::vector<T> all(layout.front + count * (dim + layout.gap) - layout.gap, narrow<T>(kNaN));
  for (size_t i = 0; i < count; ++i) {
    std::copy_n(rows.begin() + static_cast<int64_t>(i) * dim, dim,
                all.begin() + layout.front + static_cast<int64_t>(i) * (dim + layout.gap));
  }
  return all;
}

// Results between elements that must stay what they are.
template <typename T>
class Guarded {
 public:
  Guarded(size_t count, int front)
      : count_(count), front_(front), all_(std::vector<T>(front + count + kBehind, kPoison)) {}
  T* get() const { return all_.get() + front_; }
  std::vector<T> read() const {
    std::vector<T> values = all_.read(front_ + count_ + kBehind);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool is_guard = i < front_ || i >= front_ + count_;
      EXPECT_TRUE(!is_guard || static_cast<float>(values[i]) == static_cast<float>(kPoison)) << i;
    }
    return {values.begin() + static_cast<int64_t>(front_), values.begin() + static_cast<int64_t>(front_ + count_)};
  }

 private:
  static constexpr size_t kBehind = 64;
  static inline const T kPoison = narrow<T>(-77);
  size_t count_, front_;
  DeviceArray<T> all_;
};

// Calls work(i) for every i below `count`, on all processors.
template <typename Work>
void in_parallel(size_t count, const Work& work) {
  const size_t most = std::max(std::thread::hardware_concurrency(), 1u);
  std::vector<std::thread> threads;
  for (size_t first = 0; first < std::min(most, count); ++first) {
    threads.emplace_back([&work, first, count, most] {
      for (size_t i = first; i < count; i += most) work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void expect_near(double found, double expected, double tolerance) {
  if (std::isnan(expected) || std::isinf(expected)) {
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(found) : found == expected) << found << " for " << expected;
  } else {
    ASSERT_NEAR(found, expected, tolerance * std::max(1.0, std::abs(expected)));
  }
}

// Compares every element of what the kernels make of fresh inputs: of target attention alone, and with the rows of the
// histories beside it, which must not change a bit of it.
template <typename T>
void check(const Case& c, const Layout& layout, ScalarType type, double tolerance) {
  const Inputs<T> inputs(c);
  const DeviceArray<T> q(laid_out(inputs.q, c.dim, layout)), k(inputs.k), v(inputs.v),
      q_self(laid_out(inputs.q_self, c.dim, layout));
  const DeviceArray<int32_t> index(inputs.index), lengths(inputs.lengths), offsets(inputs.offsets);
  const size_t sums = inputs.q.size() / c.dim;
  const size_t self_sums = inputs.q_self.size() / c.dim;
  TargetAttentionProblem p;
  p.type = type;
  p.candidates = c.candidates;
  p.seeds = c.seeds;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.dim;
  p.users = c.users;
  p.length = c.packed ? inputs.rows : c.length;
  p.scale = 1 / std::sqrt(c.dim);
  p.q = q.get() + layout.front;
  p.q_head_stride = p.self_q_head_stride = c.dim + layout.gap;
  p.q_seed_stride = p.self_q_row_stride = c.q_heads * p.q_head_stride;
  p.q_candidate_stride = c.seeds * p.q_seed_stride;
  p.self_q_user_stride = c.length * p.q_seed_stride;
  p.k = k.get();
  p.v = v.get();
  p.k_user_stride = p.v_user_stride = c.packed ? 0 : c.length * inputs.row_size();
  p.k_row_stride = p.v_row_stride = inputs.row_size();
  p.k_head_stride = p.v_head_stride = inputs.head_size();
  p.candidate_to_user = index.get();
  p.kv_lengths = c.packed ? nullptr : lengths.get();
  p.kv_offsets = c.packed ? offsets.get() : nullptr;
  std::vector<T> first;
  for (const bool with_self : {false, true}) {
    const Guarded<T> out(inputs.q.size(), layout.out_front);
    const DeviceArray<float> lse(std::vector<float>(sums, -77));
    const Guarded<T> self_out(inputs.q_self.size(), layout.out_front);
    const DeviceArray<float> self_lse(std::vector<float>(self_sums, -77));
    p.out = out.get();
    p.logsumexp = lse.get();
    if (with_self) {
      p.self_q = q_self.get() + layout.front;
      p.self_out = self_out.get();
      p.self_logsumexp = self_lse.get();
    }
    ASSERT_TRUE(target_attention_supported(p));
    const size_t bytes = target_attention_workspace_bytes(p);
    const DeviceArray<char> workspace(std::vector<char>(bytes, 0x55));
    for (int run = 0; run < 2; ++run) target_attention(p, workspace.get(), bytes, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto compare = [&](const std::vector<T>& queries, const std::vector<T>& found,
                             const std::vector<float>& found_sums, const auto& user_of) {
      std::vector<typename Inputs<T>::Expected> expected(found_sums.size());
      in_parallel(expected.size(), [&](size_t at) {
        expected[at] = inputs.attend(&queries[at * c.dim], static_cast<int>(at % c.q_heads), user_of(at / c.q_heads));
      });
      for (size_t at = 0; at < expected.size(); ++at) {
        for (int d = 0; d < c.dim; ++d) {
          expect_near(static_cast<float>(found[at * c.dim + d]), expected[at].out[d], tolerance);
        }
        expect_near(found_sums[at], expected[at].logsumexp, 1e-5);
        if (::testing::Test::HasFatalFailure()) FAIL() << "row " << at << ", user " << user_of(at / c.q_heads);
      }
    };
    const std::vector<T> results = out.read();
    if (!with_self) {
      compare(inputs.q, results, lse.read(sums), [&](size_t row) { return inputs.index[row / c.seeds]; });
      first = results;
    } else {
      ASSERT_EQ(std::memcmp(results.data(), first.data(), first.size() * sizeof(T)), 0);
      const std::vector<int> owner = inputs.owners();
      // Rows of no history are like those of a user without one: user 0.
      compare(inputs.q_self, self_out.read(), self_lse.read(self_sums),
              [&](size_t row) { return std::max(owner[row], 0); });
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

template <typename T>
void check(const Case& c, ScalarType type, double tolerance) {
  // Dense rows of a D that is no multiple of 8 begin anywhere, the first as well.
  check<T>(c, Layout{c.dim % 8 != 0 ? 3 : 0, 0, 0}, type, tolerance);
}

class TargetAttentionSmall : public ::testing::TestWithParam<Case> {};

TEST_P(TargetAttentionSmall, AgreesWithFloat64) {
  check<__nv_bfloat16>(GetParam(), ScalarType::kBFloat16, 0x1p-7);
  check<__half>(GetParam(), ScalarType::kFloat16, 0x1p-10);
  // Where all terms of a logit have one sign, it is several times as large, and so is what its rounding does.
  check<float>(GetParam(), ScalarType::kFloat32, GetParam().signs ? 1e-5 : 4e-6);
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
                                           Case{7, 3, 20, 150, 2, 1, 32, true},    // two tiles of fp32's in one
                                           Case{9, 3, 30, 300, 4, 2, 127, false},  // queries that begin anywhere
                                           Case{9, 3, 7, 70, 2, 2, 61, true}, Case{5, 2, 64, 129, 1, 1, 249, false},
                                           Case{6, 2, 33, 190, 2, 1, 255, true},
                                           Case{9, 3, 8, 300, 4, 2, 128, false},   // pieces of 16 rows, two of a seed
                                           Case{20, 3, 12, 90, 2, 2, 64, true},    // of 4 rows
                                           Case{7, 2, 48, 140, 6, 2, 100, false},  // none: groups of 3
                                           Case{9, 3, 32, 170, 2, 1, 256, true},   // whole tiles
                                           Case{9, 3, 7, 300, 2, 2, 128, false, true},  // blocks below zero
                                           Case{9, 3, 7, 90, 2, 1, 64, true, true}));   // histories below zero

TEST(TargetAttention, OneCtaSetsUpSomeCandidatesOfAnyNumberOfUsers) {
  check<__nv_bfloat16>({16'000, 1, 1, 20, 2, 2, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({3'000, 2'047, 1, 5, 1, 1, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({3'000, 2'048, 2, 5, 1, 1, 8, true}, ScalarType::kBFloat16, 0x1p-7);
  check<float>({2'000, 3'000, 3, 5, 2, 1, 9, true}, ScalarType::kFloat32, 4e-6);
}

// Where candidates and users are few, all CTAs list the tiles, those of histories that attend to themselves too.
TEST(TargetAttention, SmallListsOfTheirOwnHaveTilesToDraw) {
  check<__nv_bfloat16>({150, 40, 40, 70, 3, 3, 64, true}, ScalarType::kBFloat16, 0x1p-7);
}
TEST(TargetAttention, AllCtasListTheTilesOfFewUsers) {
  check<__nv_bfloat16>({2'048, 128, 3, 40, 2, 2, 32, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({2'047, 1, 4, 33, 1, 1, 128, true}, ScalarType::kFloat16, 0x1p-10);
  check<__nv_bfloat16>({385, 128, 1, 90, 4, 1, 64, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({2'048, 129, 3, 40, 1, 1, 32, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({4'608, 127, 1, 40, 1, 1, 32, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({4'609, 128, 1, 40, 1, 1, 32, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({13'000, 3, 1, 40, 4, 2, 64, true}, ScalarType::kFloat16, 0x1p-10);
  check<__nv_bfloat16>({3'000, 128, 1, 40, 1, 1, 256, true}, ScalarType::kBFloat16, 0x1p-7);
}
TEST(TargetAttention, OwnListsHaveRowsOfHistoriesInManyTiles) {
  check<__nv_bfloat16>({40, 3, 6, 700, 4, 2, 128, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({60, 90, 2, 260, 2, 1, 64, true}, ScalarType::kBFloat16, 0x1p-7);
}

TEST(TargetAttention, ManyCandidatesAreSetUpByManyCtas) {
  check<__nv_bfloat16>({20'000, 300, 1, 20, 1, 1, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({140'000, 128, 1, 5, 1, 1, 8, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({17'000, 129, 1, 5, 1, 1, 8, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({17'000, 5'000, 2, 3, 2, 1, 8, true}, ScalarType::kBFloat16, 0x1p-7);
}

// Where candidates are few, as in the small cases, tiles have half as many rows.
TEST(TargetAttention, SmallFullTilesHaveRowsInBothHalvesOrInOne) {
  check<__nv_bfloat16>({60, 45, 80, 150, 3, 3, 128, true}, ScalarType::kBFloat16, 0x1p-7);
}
TEST(TargetAttention, FullTilesMayHaveRowsInOneHalfAlone) {
  check<__nv_bfloat16>({300, 260, 5, 140, 1, 1, 64, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({400, 90, 20, 300, 2, 2, 128, false}, ScalarType::kFloat16, 0x1p-10);
  check<__nv_bfloat16>({290, 140, 50, 130, 1, 1, 256, true}, ScalarType::kBFloat16, 0x1p-7);
}

// Tiles that follow each other in a CTA, over histories of more than two blocks, and over shorter ones among them.
TEST(TargetAttention, SmallTilesStageTheirResults) {
  check<__nv_bfloat16>({80, 30, 64, 300, 2, 2, 128, false}, ScalarType::kBFloat16, 0x1p-7);
}
TEST(TargetAttention, TilesStageTheirResultsInBoxesOfAnySize) {
  check<__nv_bfloat16>({300, 40, 12, 400, 4, 2, 128, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({500, 20, 4, 500, 2, 2, 96, false}, ScalarType::kFloat16, 0x1p-10);
  check<__nv_bfloat16>({200, 20, 64, 270, 2, 2, 128, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({260, 25, 48, 600, 2, 1, 72, true}, ScalarType::kFloat16, 0x1p-10);
}

TEST(TargetAttention, ManyQueriesMayBeginAnywhere) {
  check<__nv_bfloat16>({400, 90, 20, 300, 2, 2, 122, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({300, 60, 33, 200, 1, 1, 63, true}, ScalarType::kFloat16, 0x1p-10);
  // Boxes of eight rows, and of two with four query heads a key head.
  check<__nv_bfloat16>({160, 30, 64, 300, 2, 2, 127, false}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({170, 40, 64, 200, 4, 1, 50, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({150, 33, 64, 170, 1, 1, 255, false}, ScalarType::kFloat16, 0x1p-10);
}

// Rows begin at every element from a multiple of 16 bytes on, in boxes of one row and of several.
class TargetAttentionSmallAnywhere : public ::testing::TestWithParam<int> {};

TEST_P(TargetAttentionSmallAnywhere, ReadsAndWritesRowsAlone) {
  const int at = GetParam();
  check<__nv_bfloat16>({4, 2, 64, 150, 1, 1, 120 + at, false}, {at, 0, 7 - at}, ScalarType::kBFloat16, 0x1p-7);
  check<__half>({5, 3, 16, 90, 2, 1, 57 + at, true}, {7 - at, 1, at}, ScalarType::kFloat16, 0x1p-10);
  check<__nv_bfloat16>({4, 2, 9, 100, 2, 2, 64, false}, {at, at % 3 * 4, (at + 3) % 8}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({3, 2, 32, 90, 1, 1, 249 + at, true}, {at, at % 2, 5}, ScalarType::kBFloat16, 0x1p-7);
}

INSTANTIATE_TEST_SUITE_P(Elements, TargetAttentionSmallAnywhere, ::testing::Range(0, 8));

TEST(TargetAttention, EveryHeadDimension) {
  for (int dim = 1; dim <= 256; ++dim) {
    check<__nv_bfloat16>({4, 2, dim % 2 == 0 ? 16 : 3, 40, 2, 1, dim, false}, {dim % 5, dim % 7, dim % 8},
                         ScalarType::kBFloat16, 0x1p-7);
    if (HasFatalFailure()) FAIL() << "D " << dim;
  }
}

TEST(TargetAttention, SmallHistoriesWithoutCandidatesAttendToThemselves) {
  check<__nv_bfloat16>({0, 3, 4, 200, 2, 2, 64, true}, ScalarType::kBFloat16, 0x1p-7);
  check<__nv_bfloat16>({5, 4, 0, 300, 4, 2, 128, false}, ScalarType::kBFloat16, 0x1p-7);
  check<float>({0, 3, 1, 70, 2, 1, 32, false}, ScalarType::kFloat32, 4e-6);
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
  p.k_head_stride = p.v_head_stride = 16;
  EXPECT_TRUE(target_attention_supported(p));
  p.scale = -1;
  EXPECT_FALSE(target_attention_supported(p));
  EXPECT_THROW(target_attention(p, nullptr, 0, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace ikbo::kernels
