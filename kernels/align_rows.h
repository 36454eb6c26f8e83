// Rows copied to where 16 bytes of them can be read at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace ikbo::kernels {

// to[i, j, k, :columns] = from[i, j, k, :]. Elements are plain bytes, strides are in elements, `from` has stride 1
// along its rows.
struct AlignRows {
  const void* from = nullptr;  // a multiple of element_bytes
  int element_bytes = 2;       // 2, 4 or 8
  int64_t sizes[3] = {1, 1, 1};
  int64_t strides[3] = {0, 0, 0};
  int64_t columns = 0;
  void* to = nullptr;      // (to_rows, to_columns), contiguous, 16-byte aligned; zeros where `from` has nothing
  int64_t to_rows = 0;     // at least the product of sizes
  int64_t to_columns = 0;  // at least columns, a multiple of 16 bytes
  // Rows of `to` from those of one (i, j) to those of the next, where it has others between them, which stay as they
  // are. 0: none, one (i, j) stands behind the other.
  int64_t to_outer_rows = 0;
};

// Enqueues all of them on `stream`, up to kMostInOneLaunch in one launch. Throws std::runtime_error for a CUDA error.
void align_rows(const std::vector<AlignRows>& jobs, cudaStream_t stream);
constexpr size_t kMostInOneLaunch = 8;

}  // namespace ikbo::kernels
