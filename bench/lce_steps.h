// The data movement that the library stages of linear compression need beside their matrix products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/linear_compression.h"

namespace ikbo::bench {

// to (batch, k_user + k_candidate, n) = user rows that the candidates take, then the candidates' own. n a multiple
// of 8.
void broadcast_and_concatenate(const void* e_user, const void* e_candidate, const int32_t* index, void* to,
                               int64_t batch, int64_t k_user, int64_t k_candidate, int64_t n, cudaStream_t stream);

// out (batch, m n) += user (users, m n) at the candidates' rows, in the 16-bit type. m n a multiple of 8.
void gather_and_add(const void* user, const int32_t* index, void* out, int64_t batch, int64_t elements,
                    kernels::ScalarType type, cudaStream_t stream);

// A device-to-device copy by a kernel, 16 bytes a thread at a time.
void copy(const void* from, void* to, int64_t bytes, cudaStream_t stream);

}  // namespace ikbo::bench
