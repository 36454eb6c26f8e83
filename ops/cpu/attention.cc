#include "ops/cpu/attention.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/capability.h"

namespace ikbo::cpu {
namespace {

// Keys of a block: its logits and its keys stay in the second-level cache.
constexpr int64_t kKeys = 256;

// Every row is its own row of the running sum.
const int32_t* own_rows() {
  static const auto kRows = [] {
    std::array<int32_t, kAttentionRows> rows{};
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }();
  return kRows.data();
}

struct RowPlace {
  int64_t candidate;
  int64_t seed;
  int64_t head;
};

template <typename T>
RowPlace place(const AttentionTask<T>& task, int64_t row) {
  const int64_t query = row / task.group;
  return {task.candidates[query / task.seeds], query % task.seeds, row % task.group};
}

}  // namespace

template <typename T>
void attend(const AttentionTask<T>& task, int64_t row, int64_t rows) {
  using Acc = AccOf<T>;
  const int64_t dim = task.dim;
  const int64_t width = packed_width<Acc>(dim);
  const SoftmaxBlock<Acc> fold = IKBO_CPU_KERNEL(softmax_block<Acc>());

  std::vector<Acc> q(static_cast<size_t>(rows * dim));
  for (int64_t r = 0; r < rows; ++r) {
    const RowPlace at = place(task, row + r);
    const T* from =
        task.q + at.candidate * task.q_candidate_stride + at.seed * task.q_seed_stride + at.head * task.q_head_stride;
    Acc* to = q.data() + r * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<Acc>(from[d * task.q_col_stride]);
  }

  std::vector<Acc> sums(static_cast<size_t>(rows * width), Acc(0));
  std::vector<Acc> weights(static_cast<size_t>(rows * std::min(kKeys, task.length)));
  std::array<Acc, kAttentionRows> maximum;
  std::array<Acc, kAttentionRows> total;
  maximum.fill(-std::numeric_limits<Acc>::infinity());
  total.fill(Acc(0));
  const GatheredRows<Acc> before{sums.data(), width, own_rows()};
  for (int64_t key = 0; key < task.length; key += kKeys) {
    const int64_t keys = std::min(kKeys, task.length - key);
    const Acc* v = task.v + key * task.v_row_stride;
    run(RowLinear<Acc, Acc>{.x = q.data(),
                            .x_row_stride = dim,
                            .x_col_stride = 1,
                            .batch = rows,
                            .k = dim,
                            .w = task.k + key * task.k_row_stride,
                            .w_row_stride = task.k_row_stride,
                            .w_col_stride = task.k_col_stride,
                            .n = keys,
                            .out = weights.data(),
                            .out_row_stride = keys});
    for (int64_t r = 0; r < rows; ++r) {
      const auto i = static_cast<size_t>(r);
      const Acc factor = fold(weights.data() + r * keys, keys, task.scale, &maximum[i], &total[i]);
      if (key > 0) {
        for (int64_t d = 0; d < dim; ++d) sums[static_cast<size_t>(r * width + d)] *= factor;
      }
    }
    run(RowLinear<Acc, Acc>{.x = weights.data(),
                            .x_row_stride = keys,
                            .x_col_stride = 1,
                            .batch = rows,
                            .k = keys,
                            .w = v,
                            .w_row_stride = task.v_col_stride,
                            .w_col_stride = task.v_row_stride,
                            .n = dim,
                            .terms = &before,
                            .num_terms = key > 0 ? 1 : 0,
                            .out = sums.data(),
                            .out_row_stride = width});
  }

  for (int64_t r = 0; r < rows; ++r) {
    const RowPlace at = place(task, row + r);
    const auto i = static_cast<size_t>(r);
    T* to = task.out + at.candidate * task.out_stride + (at.seed * task.out_heads + at.head) * dim;
    const Acc* from = sums.data() + r * width;
    for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(task.length == 0 ? Acc(0) : from[d] / total[i]);
    if (task.logsumexp != nullptr) {
      task.logsumexp[(at.candidate * task.seeds + at.seed) * task.out_heads + at.head] =
          maximum[i] + std::log(total[i]);  // −∞ without history
    }
  }
}

template void attend(const AttentionTask<double>& task, int64_t row, int64_t rows);
template void attend(const AttentionTask<float>& task, int64_t row, int64_t rows);
template void attend(const AttentionTask<c10::BFloat16>& task, int64_t row, int64_t rows);
template void attend(const AttentionTask<c10::Half>& task, int64_t row, int64_t rows);

}  // namespace ikbo::cpu
