// Launches of target attention over a list of tiles that the set-up has made.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/target_attention_params.h"

namespace ikbo::kernels {

void launch_attention_fp32(const AttentionParams& params, int64_t most_tiles, int multiprocessors, cudaStream_t stream);

}  // namespace ikbo::kernels
