// What the generic kernels of target attention, forward and backward, share: where a user's history lies, and tiles of
// rows in shared memory.
#pragma once

#include <algorithm>

#include "kernels/scalars.cuh"
#include "kernels/target_attention.h"

namespace ikbo::kernels {

constexpr int kRows = 32;      // query rows of a tile
constexpr int kThreads = 256;  // 8 to a query row
constexpr int kLanes = kThreads / kRows;

// Keys of a tile: as many as leave room for D = 256 in fp64.
template <typename Sum>
constexpr int kKeys = sizeof(Sum) == 8 ? 16 : 32;

struct History {
  int64_t first;  // row of k and v, behind the user's own stride
  int64_t length;
};

__device__ __forceinline__ int64_t clamp_to(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}

// The history of a user in [0, users).
__device__ __forceinline__ History history_of(const TargetAttentionProblem& p, int64_t user) {
  if (p.kv_offsets != nullptr) {
    const int64_t begin = clamp_to(p.kv_offsets[user], 0, p.length);
    return {begin, clamp_to(p.kv_offsets[user + 1], begin, p.length) - begin};
  }
  return {0, p.kv_lengths != nullptr ? clamp_to(p.kv_lengths[user], 0, p.length) : p.length};
}

template <typename T>
__device__ __forceinline__ const T* keys_of(const TargetAttentionProblem& p, int64_t user, int64_t head) {
  return static_cast<const T*>(p.k) + (p.kv_offsets != nullptr ? 0 : user * p.k_user_stride) + head * p.k_head_stride;
}

template <typename T>
__device__ __forceinline__ const T* values_of(const TargetAttentionProblem& p, int64_t user, int64_t head) {
  return static_cast<const T*>(p.v) + (p.kv_offsets != nullptr ? 0 : user * p.v_user_stride) + head * p.v_head_stride;
}

// Row r of the tile, as sums' type, from where `row(r)` points to; null is a row of zeros.
template <typename T, typename Row>
__device__ void load_rows(Row&& row, int tile_rows, int64_t dim, SumOf<T>* to, int stride) {
  for (int r = static_cast<int>(threadIdx.x) / 32; r < tile_rows; r += kThreads / 32) {
    const T* const from = row(r);
    for (int64_t d = static_cast<int64_t>(threadIdx.x % 32); d < dim; d += 32) {
      to[r * stride + d] = from != nullptr ? widen(from[d]) : SumOf<T>{0};
    }
  }
}

// Keys or values [first, first + count) of a history, the rest of the tile zeros: what follows is another user's.
template <typename T>
__device__ void load_history(const T* from, int64_t row_stride, int64_t first, int64_t count, int tile_rows,
                             int64_t dim, SumOf<T>* to, int stride) {
  load_rows<T>([&](int r) { return r < count ? from + (first + r) * row_stride : nullptr; }, tile_rows, dim, to,
               stride);
}

template <typename Sum>
__device__ __forceinline__ Sum dot(const Sum* x, const Sum* y, int64_t dim) {
  Sum sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum = fma(x[d], y[d], sum);
  return sum;
}

// Over the 8 lanes of a row.
template <typename Sum>
__device__ __forceinline__ Sum sum_of_row(Sum value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffff'ffff, value, offset);
  return value;
}

template <typename Sum>
__device__ __forceinline__ Sum max_of_row(Sum value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    const Sum other = __shfl_xor_sync(0xffff'ffff, value, offset);
    value = other > value || other != other ? other : value;
  }
  return value;
}

// Rows of shared memory have an odd length, so that threads that read a column meet different banks.
inline int padded_dim(int64_t dim) {
  return static_cast<int>(dim) | 1;
}

inline unsigned grid_of(int64_t tasks) {
  return static_cast<unsigned>(std::min<int64_t>(tasks, (int64_t{1} << 31) - 1));
}

void check_target_attention(const TargetAttentionProblem& problem);

template <typename Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("target_attention: cannot have ") + std::to_string(bytes) +
                             " bytes of shared memory: " + cudaGetErrorString(error));
  }
}

}  // namespace ikbo::kernels
