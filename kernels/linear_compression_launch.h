// The instantiations of the linear-compression kernel: one file a tile height, made from
// linear_compression_instance.cu.in, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/linear_compression_blocks.h"
#include "kernels/linear_compression_params.h"

namespace ikbo::kernels {

#define IKBO_DECLARE(BLOCK_M)                                                                             \
  cudaError_t launch_linear_compression_##BLOCK_M(const LinearCompressionParams& params, ScalarType type, \
                                                  const LinearCompressionConfig& config, cudaStream_t stream);
IKBO_LINEAR_COMPRESSION_BLOCKS(IKBO_DECLARE)
#undef IKBO_DECLARE

}  // namespace ikbo::kernels
