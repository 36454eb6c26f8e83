// The epilogue of a product whose sums were left unrounded: what was computed once a user is looked up and added, then
// bias, activation and one rounding.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/scalar_type.h"

namespace ikbo::kernels {

enum class Activation { kNone, kRelu, kSigmoid, kTanh, kSilu, kGelu };

// Sums of a broadcast term, unrounded, looked up by candidate.
struct LookedUpSums {
  const void* sums = nullptr;  // (rows, columns), of the type that sums are kept in
  int64_t rows = 0;
  const int32_t* index = nullptr;  // (candidates); one outside [0, rows) gives NaN and reads nothing
};

// out[b, j] = act(sums[b, j] + sum over t of terms[t].sums[terms[t].index[b], j] + bias[j]). All pointers are to device
// memory. `out` may be `sums`, if it has its type and row_stride is columns.
struct FinishSums {
  ScalarType type = ScalarType::kFloat32;      // of bias
  ScalarType out_type = ScalarType::kFloat32;  // type, or the one that sums are kept in: fp32, or fp64 for fp64
  int64_t candidates = 0;
  int64_t columns = 0;
  // Of all sums, in elements; fastest a multiple of 4. What lies between columns and it may be anything.
  int64_t row_stride = 0;
  const void* sums = nullptr;            // (candidates, columns)
  std::vector<LookedUpSums> terms = {};  // at most kMaxLookedUpSums
  const void* bias = nullptr;            // (columns), or null
  Activation activation = Activation::kNone;
  void* out = nullptr;  // (candidates, columns), contiguous
};

constexpr int kMaxLookedUpSums = 16;

// Enqueues it on `stream`; reads nothing on the host. Throws std::invalid_argument for more terms than there can be and
// std::runtime_error for a CUDA error.
void finish_sums(const FinishSums& job, cudaStream_t stream);

}  // namespace ikbo::kernels
