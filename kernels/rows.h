// Rows of request-only tensors looked up by candidates, and the transpose of that, the sum of candidates' rows by user.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/scalar_type.h"

namespace ikbo::kernels {

// out[b] = from[index[b]]. Rows are plain bytes. All pointers are to device memory.
struct RowLookup {
  const void* from = nullptr;  // (rows, row_bytes)
  int64_t rows = 0;
  int64_t row_bytes = 0;           // a multiple of fill_bytes
  int64_t row_stride = 0;          // bytes
  const int32_t* index = nullptr;  // (count)
  int64_t count = 0;
  void* out = nullptr;  // (count, row_bytes), contiguous
  // What the row of an index outside [0, rows) is filled with: an element's bits, such as those of a NaN.
  uint64_t fill = 0;
  int fill_bytes = 1;  // 1, 2, 4 or 8
};

// Enqueues the lookup on `stream`; reads nothing on the host. Throws std::runtime_error for a CUDA error.
void look_up_rows(const RowLookup& lookup, cudaStream_t stream);

// out[u] = sum over i in [begin[u], begin[u + 1]) of values[order[i]]: candidates grouped by user. Sums are in fp32
// (fp64 for fp64) in an order that depends on the user's own candidates alone, rounded once.
struct RowSum {
  ScalarType type = ScalarType::kFloat32;  // of values and out
  const void* values = nullptr;            // (candidates, features), contiguous
  int64_t features = 0;
  const int64_t* order = nullptr;  // (candidates)
  const int64_t* begin = nullptr;  // (users + 1)
  int64_t users = 0;
  void* out = nullptr;  // (users, features), contiguous
};

void sum_rows_by_user(const RowSum& sum, cudaStream_t stream);

}  // namespace ikbo::kernels
