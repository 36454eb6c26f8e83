// What one instruction set offers to row_linear.cc. Each row_linear_kernel object fills one such table.
#pragma once

#include <cstdint>

#include "ops/cpu/row_linear.h"

namespace ikbo::cpu {

/// Widest panel in columns of any instruction set: the longest run of a row that stays in registers.
inline constexpr int64_t kMaxPanelColumns = 64;
/// Rows of a task: long enough to use a panel from the second-level cache many times, short enough that few candidates
/// still spread over threads.
inline constexpr int64_t kChunkRows = 48;

template <typename T, typename Out>
struct RowLinearKernels {
  using Acc = AccOf<T>;
  int64_t vector_columns;  // columns of one register
  int64_t panel_columns;   // columns of a full panel
  /// Writes columns [column, column + columns) of Wᵀ to `panel` as (k, columns padded to whole vectors), zeros beyond,
  /// or, where there are very few of them, as (columns, k).
  void (*pack)(const RowLinear<T, Out>& job, int64_t column, int64_t columns, Acc* panel);
  /// Computes rows [row, row + rows) of those columns, from W itself where `panel` is null; `scratch` holds
  /// kChunkRows * k elements, used only where the rows of x cannot be read in place.
  void (*compute)(const RowLinear<T, Out>& job, int64_t row, int64_t rows, int64_t column, int64_t columns,
                  const Acc* panel, Acc* scratch);
  /// Whether `compute` needs the scratch for this job.
  bool (*needs_scratch)(const RowLinear<T, Out>& job);
  /// Whether `compute` can read W as it lies in memory.
  bool (*reads_in_place)(const RowLinear<T, Out>& job);
};

#define IKBO_DECLARE_CAPABILITY(capability)             \
  namespace capability {                                \
  template <typename T, typename Out>                   \
  const RowLinearKernels<T, Out>& row_linear_kernels(); \
  }
IKBO_DECLARE_CAPABILITY(DEFAULT)
IKBO_DECLARE_CAPABILITY(AVX2)
IKBO_DECLARE_CAPABILITY(AVX512)
#undef IKBO_DECLARE_CAPABILITY

}  // namespace ikbo::cpu
