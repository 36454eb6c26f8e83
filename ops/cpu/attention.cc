#include "ops/cpu/attention.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

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
  const auto uninitialised = [](int64_t count) { return std::unique_ptr<Acc[]>(new Acc[static_cast<size_t>(count)]); };

  const auto q = uninitialised(rows * dim);  // scaled
  for (int64_t r = 0; r < rows; ++r) {
    const RowPlace at = place(task, row + r);
    const T* from =
        task.q + at.candidate * task.q_candidate_stride + at.seed * task.q_seed_stride + at.head * task.q_head_stride;
    Acc* to = q.get() + r * dim;
    if (task.q_col_stride == 1) {
      for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<Acc>(from[d]) * task.scale;
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<Acc>(from[d * task.q_col_stride]) * task.scale;
    }
  }

  auto sums = uninitialised(rows * width);
  auto next = uninitialised(task.length > kKeys ? rows * width : 0);
  const auto weights = uninitialised(rows * std::min(kKeys, task.length));
  std::array<Acc, kAttentionRows> maximum;
  std::array<Acc, kAttentionRows> total;
  maximum.fill(-std::numeric_limits<Acc>::infinity());
  total.fill(Acc(0));
  for (int64_t key = 0; key < task.length; key += kKeys) {
    const int64_t keys = std::min(kKeys, task.length - key);
    const Acc* v = task.v + key * task.v_row_stride;
    run(RowLinear<Acc, Acc>{.x = q.get(),
                            .x_row_stride = dim,
                            .x_col_stride = 1,
                            .batch = rows,
                            .k = dim,
                            .w = task.k + key * task.k_row_stride,
                            .w_row_stride = task.k_row_stride,
                            .w_col_stride = task.k_col_stride,
                            .n = keys,
                            .out = weights.get(),
                            .out_row_stride = keys});
    for (int64_t r = 0; r < rows; ++r) {
      const auto i = static_cast<size_t>(r);
      const Acc factor = fold(weights.get() + r * keys, keys, &maximum[i], &total[i]);
      if (key > 0) {
        for (int64_t d = 0; d < dim; ++d) sums[static_cast<size_t>(r * width + d)] *= factor;
      }
    }
    const GatheredRows<Acc> before{sums.get(), width, own_rows()};
    run(RowLinear<Acc, Acc>{.x = weights.get(),
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
                            .out = key > 0 ? next.get() : sums.get(),
                            .out_row_stride = width});
    if (key > 0) std::swap(sums, next);
  }

  for (int64_t r = 0; r < rows; ++r) {
    const RowPlace at = place(task, row + r);
    const auto i = static_cast<size_t>(r);
    T* to = task.out + at.candidate * task.out_stride + (at.seed * task.out_heads + at.head) * dim;
    const Acc* from = sums.get() + r * width;
    if (task.length == 0) {
      std::fill_n(to, dim, T(0));
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(from[d] / total[i]);
    }
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
