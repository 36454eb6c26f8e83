#include <algorithm>

#include "kernels/rows.h"
#include "kernels/scalars.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kLookupThreads = 256;
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

template <typename Vector>
__device__ __forceinline__ Vector filled(uint64_t fill, int fill_bytes) {
  // Elements are aligned inside a vector, so the pattern repeats in its bytes.
  uint64_t pattern = fill;
  for (int bytes = fill_bytes; bytes < 8; bytes *= 2) pattern |= pattern << (8 * bytes);
  if constexpr (sizeof(Vector) == 16) {
    const auto low = static_cast<uint32_t>(pattern);
    const auto high = static_cast<uint32_t>(pattern >> 32);
    return Vector{low, high, low, high};
  } else {
    return static_cast<Vector>(pattern);
  }
}

// threadIdx.y picks one of a block's rows, threadIdx.x runs along it.
template <typename Vector>
__global__ void look_up_rows_kernel(const __grid_constant__ RowLookup lookup, int64_t vectors) {
  constexpr int kUnroll = 4;
  const Vector fill = filled<Vector>(lookup.fill, lookup.fill_bytes);
  for (int64_t b = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; b < lookup.count;
       b += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = lookup.index[b];
    auto* const to = static_cast<Vector*>(lookup.out) + b * vectors;
    if (row < 0 || row >= lookup.rows) {
      for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = fill;
      continue;
    }
    const auto* const from =
        reinterpret_cast<const Vector*>(static_cast<const char*>(lookup.from) + row * lookup.row_stride);
    int64_t i = threadIdx.x;
    for (; i + (kUnroll - 1) * int64_t{blockDim.x} < vectors; i += kUnroll * int64_t{blockDim.x}) {
      Vector held[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) held[j] = from[i + j * int64_t{blockDim.x}];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) to[i + j * int64_t{blockDim.x}] = held[j];
    }
    for (; i < vectors; i += blockDim.x) to[i] = from[i];
  }
}

template <typename Vector>
void look_up(const RowLookup& lookup, cudaStream_t stream) {
  const int64_t vectors = lookup.row_bytes / static_cast<int64_t>(sizeof(Vector));
  int along = 1;
  while (along < kLookupThreads && along < vectors) along *= 2;
  const dim3 threads(along, kLookupThreads / along);
  const int64_t blocks = std::min((lookup.count + threads.y - 1) / threads.y, kMaxBlocks);
  look_up_rows_kernel<Vector><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(lookup, vectors);
  check_launch("look_up_rows");
}

constexpr int kColumns = 32;
constexpr int kLanes = 8;

// A block sums 32 columns of one user: lane l adds the candidates l, l + 8, ..., then the lanes are added in order.
template <typename T>
__global__ void sum_rows_kernel(const __grid_constant__ RowSum sum, int64_t column_blocks) {
  using Sum = SumOf<T>;
  __shared__ Sum partial[kLanes][kColumns];
  const auto* const values = static_cast<const T*>(sum.values);
  const int64_t tasks = sum.users * column_blocks;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t user = task / column_blocks;
    const int64_t column = task % column_blocks * kColumns + threadIdx.x;
    const int64_t end = sum.begin[user + 1];
    Sum own = 0;
    if (column < sum.features) {
      for (int64_t i = sum.begin[user] + threadIdx.y; i < end; i += kLanes) {
        own += widen(values[sum.order[i] * sum.features + column]);
      }
    }
    partial[threadIdx.y][threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.y == 0 && column < sum.features) {
      for (int lane = 1; lane < kLanes; ++lane) own += partial[lane][threadIdx.x];
      static_cast<T*>(sum.out)[user * sum.features + column] = narrow<T>(own);
    }
    __syncthreads();
  }
}

}  // namespace

void look_up_rows(const RowLookup& lookup, cudaStream_t stream) {
  if (lookup.count == 0 || lookup.row_bytes == 0) return;
  // The widest vector that every address is a multiple of.
  const auto address = reinterpret_cast<uintptr_t>(lookup.from) | reinterpret_cast<uintptr_t>(lookup.out) |
                       static_cast<uintptr_t>(lookup.row_bytes) | static_cast<uintptr_t>(lookup.row_stride);
  if (address % 16 == 0) {
    look_up<uint4>(lookup, stream);
  } else if (address % 8 == 0) {
    look_up<uint64_t>(lookup, stream);
  } else if (address % 4 == 0) {
    look_up<uint32_t>(lookup, stream);
  } else if (address % 2 == 0) {
    look_up<uint16_t>(lookup, stream);
  } else {
    look_up<uint8_t>(lookup, stream);
  }
}

void sum_rows_by_user(const RowSum& sum, cudaStream_t stream) {
  if (sum.users == 0 || sum.features == 0) return;
  const int64_t column_blocks = (sum.features + kColumns - 1) / kColumns;
  const auto blocks = static_cast<unsigned>(std::min(sum.users * column_blocks, kMaxBlocks));
  with_scalar(sum.type, [&](auto scalar) {
    sum_rows_kernel<decltype(scalar)><<<blocks, dim3(kColumns, kLanes), 0, stream>>>(sum, column_blocks);
  });
  check_launch("sum_rows_by_user");
}

}  // namespace ikbo::kernels
