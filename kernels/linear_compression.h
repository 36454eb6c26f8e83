// Linear compression embedding that never copies the user, on Hopper GPUs:
//
//   out[b] = W_c E_c[b] + sum over t of W_t E_t[index_t(b)]        W (M, K), E (rows, K, N), out (B, M, N)
//
// Sums are in fp32 and rounded once: a broadcast term stays in fp32 until the final sum. See
// docs/kernels/linear_compression.md for the method, its source and what was measured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/linear_compression_config.h"
#include "kernels/scalar_type.h"

namespace ikbo::kernels {

// One product W E. Strides are in elements; the last dimension of each tensor is contiguous.
struct LinearCompressionTerm {
  const void* w = nullptr;     // (M, k)
  int64_t w_row_stride = 0;    // at least k; fastest when w is 16-byte aligned and this a multiple of 8
  const void* e = nullptr;     // (rows, k, N)
  int64_t e_batch_stride = 0;  // fastest when e is 16-byte aligned and this and e_row_stride are multiples of 8
  int64_t e_row_stride = 0;    // at least N
  int64_t rows = 0;            // the candidate term: B; a broadcast term: users (or vendors, ...)
  int64_t k = 0;
  const int32_t* index = nullptr;  // (B) on the device, a broadcast term alone: the row of e that a candidate takes
};

// All pointers are to device memory. An index outside [0, rows) gives NaN for its candidate and reads nothing.
struct LinearCompressionProblem {
  int64_t batch = 0;  // B
  int64_t m = 0;
  int64_t n = 0;
  ScalarType type = ScalarType::kBFloat16;      // of every w and e: kFloat16 or kBFloat16
  ScalarType out_type = ScalarType::kBFloat16;  // the same type, or kFloat32
  LinearCompressionTerm candidate;
  std::vector<LinearCompressionTerm> broadcast;  // at most kMaxBroadcastTerms
  void* out = nullptr;                           // (B, M, N), contiguous
};

constexpr int kMaxBroadcastTerms = 4;

// How the work is launched. Both are the same arithmetic, bit for bit.
enum class LinearCompressionStage {
  kFused,    // broadcast terms in one launch, then candidates, the broadcast sum added in the epilogue
  kFusedWs,  // one persistent launch for all
};

// The shape that a configuration is chosen for.
LinearCompressionShape shape_of(const LinearCompressionProblem& problem);

// Bytes of workspace that a launch of this problem needs. What they hold before and after does not matter, and launches
// that follow each other on a stream (or in a graph) may share them. At least 256-byte aligned.
size_t linear_compression_workspace_bytes(const LinearCompressionProblem& problem,
                                          const LinearCompressionConfig& config);

// Enqueues the computation on `stream` of the current device; reads nothing on the host and can be captured in a CUDA
// graph. Throws std::invalid_argument for a bad argument, naming it, and std::runtime_error for a CUDA error.
void linear_compression(const LinearCompressionProblem& problem, const LinearCompressionConfig& config, void* workspace,
                        size_t workspace_bytes, LinearCompressionStage stage, cudaStream_t stream);

// The choice for the current device.
LinearCompressionConfig choose_linear_compression_config(const LinearCompressionProblem& problem);

}  // namespace ikbo::kernels
