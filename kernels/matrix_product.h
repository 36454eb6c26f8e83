// A matrix product whose rows do not know of each other, for any type, stride and size:
//
//   out[z, i, j] = act(sum over k of a[i, k] b[z, k, j] + sum over t of sums_t[index_t, ..., j] + bias[j])
//
// Sums are in fp32 (fp64 for fp64) with one rounding. Each element is one chain of sums over k in an order that depends
// on k alone, so a candidate gets the same bits alone, in any batch and in any order. It is what linear takes, and
// linear compression where the kernels for Hopper's matrix unit do not fit (linear_compression.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/scalar_type.h"

namespace ikbo::kernels {

enum class Activation { kNone, kRelu, kSigmoid, kTanh, kSilu, kGelu };

// Sums of a broadcast term, unrounded, looked up by candidate.
struct LookedUpSums {
  const void* sums = nullptr;  // contiguous, fp32 (fp64): (rows, m, n), looked up by z; or (rows, n), looked up by i
  int64_t rows = 0;
  const int32_t* index = nullptr;  // (batch) or (m); one outside [0, rows) gives NaN and reads nothing
};

// All pointers are to device memory, strides in elements.
struct MatrixProduct {
  ScalarType type = ScalarType::kFloat32;      // of a, b and bias
  ScalarType out_type = ScalarType::kFloat32;  // type, or the type that sums are kept in
  int64_t batch = 1;                           // z
  int64_t m = 0;                               // i
  int64_t n = 0;                               // j
  int64_t k = 0;
  const void* a = nullptr;
  int64_t a_row_stride = 0;
  int64_t a_column_stride = 1;
  const void* b = nullptr;
  int64_t b_batch_stride = 0;
  int64_t b_row_stride = 0;
  int64_t b_column_stride = 1;
  const void* bias = nullptr;            // (n), contiguous, or null
  std::vector<LookedUpSums> terms = {};  // at most kMaxLookedUpSums
  bool index_by_row = false;             // whether candidates are the rows i rather than the batch z
  Activation activation = Activation::kNone;
  void* out = nullptr;  // (batch, m, n), contiguous
};

constexpr int kMaxLookedUpSums = 16;

// Enqueues the product on `stream`; reads nothing on the host and can be captured in a CUDA graph. Throws
// std::invalid_argument for a bad argument, naming it, and std::runtime_error for a CUDA error.
void matrix_product(const MatrixProduct& product, cudaStream_t stream);

}  // namespace ikbo::kernels
