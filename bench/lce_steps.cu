#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "bench/lce_steps.h"
#include "tests/gpu/lce_inputs.h"

namespace ikbo::bench {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kVectorElements = 8;

__global__ void concatenate_kernel(const uint4* e_user, const uint4* e_candidate, const int32_t* index, uint4* to,
                                   int64_t user_vectors, int64_t candidate_vectors) {
  const int64_t candidate = blockIdx.y;
  const int64_t vectors = user_vectors + candidate_vectors;
  const uint4* user = e_user + int64_t{index[candidate]} * user_vectors;
  const uint4* own = e_candidate + candidate * candidate_vectors;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x) {
    to[candidate * vectors + i] = i < user_vectors ? user[i] : own[i - user_vectors];
  }
}

template <typename T>
__global__ void gather_add_kernel(const uint4* user, const int32_t* index, uint4* out, int64_t vectors) {
  const int64_t candidate = blockIdx.y;
  const uint4* from = user + int64_t{index[candidate]} * vectors;
  uint4* to = out + candidate * vectors;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 a = from[i];
    uint4 b = to[i];
    const T* x = reinterpret_cast<const T*>(&a);
    T* y = reinterpret_cast<T*>(&b);
#pragma unroll
    for (int j = 0; j < kVectorElements; ++j) {
      y[j] = static_cast<T>(static_cast<float>(x[j]) + static_cast<float>(y[j]));
    }
    to[i] = b;
  }
}

__global__ void copy_kernel(const uint4* from, uint4* to, int64_t vectors) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

unsigned blocks_for(int64_t vectors, int64_t most) {
  return static_cast<unsigned>(std::clamp<int64_t>((vectors + kThreads - 1) / kThreads, 1, most));
}

}  // namespace

void broadcast_and_concatenate(const void* e_user, const void* e_candidate, const int32_t* index, void* to,
                               int64_t batch, int64_t k_user, int64_t k_candidate, int64_t n, cudaStream_t stream) {
  const int64_t vectors = (k_user + k_candidate) * n / kVectorElements;
  concatenate_kernel<<<dim3(blocks_for(vectors, 64), batch), kThreads, 0, stream>>>(
      static_cast<const uint4*>(e_user), static_cast<const uint4*>(e_candidate), index, static_cast<uint4*>(to),
      k_user * n / kVectorElements, k_candidate * n / kVectorElements);
  testing::check(cudaGetLastError(), "broadcast_and_concatenate");
}

void gather_and_add(const void* user, const int32_t* index, void* out, int64_t batch, int64_t elements,
                    kernels::ScalarType type, cudaStream_t stream) {
  const int64_t vectors = elements / kVectorElements;
  const dim3 blocks(blocks_for(vectors, 64), batch);
  const auto* from = static_cast<const uint4*>(user);
  auto* to = static_cast<uint4*>(out);
  if (type == kernels::ScalarType::kFloat16) {
    gather_add_kernel<__half><<<blocks, kThreads, 0, stream>>>(from, index, to, vectors);
  } else {
    gather_add_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(from, index, to, vectors);
  }
  testing::check(cudaGetLastError(), "gather_and_add");
}

void copy(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
  const int64_t vectors = bytes / 16;
  copy_kernel<<<blocks_for(vectors, 132 * 32), kThreads, 0, stream>>>(static_cast<const uint4*>(from),
                                                                      static_cast<uint4*>(to), vectors);
  testing::check(cudaGetLastError(), "copy");
}

}  // namespace ikbo::bench
