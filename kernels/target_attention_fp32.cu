// Target attention in fp32, whose products the matrix unit does not have: on the vector units, with tiles in shared
// memory and sums in registers.
//
// A CTA takes 64 packed query rows of one user and key head and goes through the history 64 keys at a time. Of the 16 x
// 16 threads each has 4 rows: first of their logits with keys `column`, `column + 16`, ..., then of the output's
// columns. Keys and values take turns in the same memory, so that two CTAs fit a multiprocessor and one loads while the
// other computes.
#include <algorithm>

#include "kernels/target_attention_launch.h"
#include "kernels/target_attention_packed.cuh"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kSide = 16;  // threads along each side
constexpr int kPerThread = 4;
constexpr int kTile = kSide * kPerThread;  // query rows, and keys
constexpr int kTilesOfAttentionTile = kTileRows / kTile;
constexpr int kWeightStride = kTile + 4;

// Floats from one row to the next: an odd number of 16 bytes, so that threads that read 16 bytes of consecutive rows
// meet different banks.
__host__ __device__ inline int row_stride(int dim) {
  const int quads = (dim + 3) / 4;
  return 4 * (quads | 1);
}

struct Memory {
  float* queries;  // (kTile, stride)
  float* history;  // (kTile, stride), keys or values
  float* weights;  // (kTile, kWeightStride)

  __device__ Memory(float* memory, int stride)
      : queries(memory), history(memory + kTile * stride), weights(memory + 2 * kTile * stride) {}
  static size_t bytes(int stride) { return sizeof(float) * (2 * kTile * stride + kTile * kWeightStride); }
};

// Rows of D floats, one warp a row; up to a multiple of 4 zeros. `row(r)` is null where there is none.
template <typename Row>
__device__ void load_tile(Row&& row, int dim, float* to, int stride) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kRowsAtATime = 4;
  const int whole = (dim + 3) / 4 * 4;
  for (int first = warp * kRowsAtATime; first < kTile; first += kThreads / 32 * kRowsAtATime) {
    const float* from[kRowsAtATime];
#pragma unroll
    for (int i = 0; i < kRowsAtATime; ++i) from[i] = row(first + i);
    for (int d = lane; d < whole; d += 32) {
      float held[kRowsAtATime];
#pragma unroll
      for (int i = 0; i < kRowsAtATime; ++i) held[i] = from[i] != nullptr && d < dim ? from[i][d] : 0.0f;
#pragma unroll
      for (int i = 0; i < kRowsAtATime; ++i) to[(first + i) * stride + d] = held[i];
    }
  }
}

__device__ __forceinline__ float4 quad(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// logit[i][j] = query row i of this thread times key j.
__device__ __forceinline__ void multiply_keys(const Memory& memory, int stride, int dim, int row, int column,
                                              float (&logit)[kPerThread][kPerThread]) {
  for (int d = 0; d < dim; d += 4) {
    float4 q[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) q[i] = quad(memory.queries + (row + i) * stride + d);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const float4 k = quad(memory.history + (column + j * kSide) * stride + d);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        float sum = logit[i][j];
        sum = fmaf(q[i].x, k.x, sum);
        sum = fmaf(q[i].y, k.y, sum);
        sum = fmaf(q[i].z, k.z, sum);
        logit[i][j] = fmaf(q[i].w, k.w, sum);
      }
    }
  }
}

// Over the 16 threads of a row.
template <typename Combine>
__device__ __forceinline__ float combine_row(float value, Combine&& combine) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(0xffff'ffff, value, offset));
  return value;
}

// Of a thread's 4 rows. VECTOR of D's columns together, VECTORS of them kSide * VECTOR apart.
template <int VECTOR, int VECTORS>
struct Sums {
  float out[kPerThread][VECTORS][VECTOR] = {};
  float highest[kPerThread];
  float total[kPerThread] = {};

  __device__ Sums() {
    for (float& value : highest) value = -infinity<float>();
  }

  // Logits become weights in shared memory; what was summed so far is made relative to the new highest logit.
  __device__ __forceinline__ void weigh(float (&logit)[kPerThread][kPerThread], int count, float scale, int row,
                                        int column, float* weights) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float largest = highest[i];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        logit[i][j] = column + j * kSide < count ? logit[i][j] * scale : -infinity<float>();
        largest = fmaxf(largest, logit[i][j]);  // passes NaN over: the sums keep it
      }
      largest = combine_row(largest, [](float a, float b) { return fmaxf(a, b); });
      // Without a finite logit so far, weights of 0 and not of NaN.
      const float shift = largest == -infinity<float>() ? 0.0f : largest;
      const float correction = highest[i] == largest ? 1.0f : expf(highest[i] - shift);
      highest[i] = largest;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const float weight = expf(logit[i][j] - shift);
        sum += weight;
        weights[(row + i) * kWeightStride + column + j * kSide] = weight;
      }
      total[i] = fmaf(total[i], correction, combine_row(sum, [](float a, float b) { return a + b; }));
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) out[i][v][c] *= correction;
      }
    }
  }

  __device__ __forceinline__ void add_values(const Memory& memory, int stride, int count, int dim, int row,
                                             int column) {
    for (int key = 0; key < count; key += 4) {  // weights beyond count are 0, and so are values
      float weight[kPerThread][4];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float4 w = quad(memory.weights + (row + i) * kWeightStride + key);
        weight[i][0] = w.x, weight[i][1] = w.y, weight[i][2] = w.z, weight[i][3] = w.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          const int first = (v * kSide + column) * VECTOR;
          if (first >= dim) continue;
          float value[VECTOR];
          if constexpr (VECTOR == 4) {
            *reinterpret_cast<float4*>(value) = quad(memory.history + (key + k) * stride + first);
          } else {
            *reinterpret_cast<float2*>(value) =
                *reinterpret_cast<const float2*>(memory.history + (key + k) * stride + first);
          }
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) out[i][v][c] = fmaf(weight[i][k], value[c], out[i][v][c]);
          }
        }
      }
    }
  }
};

// What the rows of a tile get: their sums, or zeros without a history, or NaN without a user.
template <int VECTOR, int VECTORS>
__device__ void write_rows(const AttentionQueries& queries, int dim, const AttentionTile& tile,
                           const Sums<VECTOR, VECTORS>& sums, const uint32_t* out_row, int row, int column) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t number = out_row[row + i];
    if (number == kNoRow) continue;
    const float empty = tile.user >= 0 ? 0.0f : quiet_nan<float>();
    float* const to = static_cast<float*>(queries.out) + static_cast<int64_t>(number) * dim;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        const int d = (v * kSide + column) * VECTOR + c;
        if (d < dim) to[d] = tile.kv_length > 0 ? sums.out[i][v][c] / sums.total[i] : empty;
      }
    }
    if (queries.logsumexp != nullptr && column == 0) {
      const float none = tile.user >= 0 ? -infinity<float>() : quiet_nan<float>();
      static_cast<float*>(queries.logsumexp)[number] =
          tile.kv_length > 0 ? sums.highest[i] + logf(sums.total[i]) : none;
    }
  }
}

template <int VECTOR, int VECTORS>
__global__ __launch_bounds__(kThreads) void fp32_attention_kernel(const __grid_constant__ AttentionParams params,
                                                                  int stride) {
  extern __shared__ __align__(16) float bytes[];
  __shared__ uint32_t out_row[kTile];
  __shared__ const float* query[kTile];
  const Memory memory(bytes, stride);
  const TargetAttentionProblem& p = params.problem;
  const auto dim = static_cast<int>(p.head_dim);
  const auto scale = static_cast<float>(p.scale);
  const int row = static_cast<int>(threadIdx.x) / kSide * kPerThread;
  const int column = static_cast<int>(threadIdx.x) % kSide;
  const uint32_t tasks = params.workspace.header->tile_count * kTilesOfAttentionTile;
  for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const AttentionTile tile = params.workspace.tiles[task / kTilesOfAttentionTile];
    const int first_row = static_cast<int>(task % kTilesOfAttentionTile) * kTile;
    if (first_row >= tile.rows) continue;
    __syncthreads();  // nobody reads the tile before any more
    if (threadIdx.x < kTile) {
      const PackedRow<float> packed = locate_packed_row<float>(params, tile, first_row + static_cast<int>(threadIdx.x));
      out_row[threadIdx.x] = packed.out_row;
      query[threadIdx.x] = packed.query;
    }
    __syncthreads();
    Sums<VECTOR, VECTORS> sums;
    if (tile.kv_length > 0) load_tile([&](int r) { return query[r]; }, dim, memory.queries, stride);
    for (int key = 0; key < tile.kv_length; key += kTile) {
      const int count = min(kTile, tile.kv_length - key);
      const auto load = [&](const float* head, int64_t history_stride) {
        load_tile([&](int r) { return r < count ? head + (tile.kv_first + key + r) * history_stride : nullptr; }, dim,
                  memory.history, stride);
        __syncthreads();
      };
      load(keys_of<float>(p, tile.user, tile.kv_head), p.k_row_stride);
      float logit[kPerThread][kPerThread] = {};
      multiply_keys(memory, stride, dim, row, column, logit);
      sums.weigh(logit, count, scale, row, column, memory.weights);
      __syncthreads();
      load(values_of<float>(p, tile.user, tile.kv_head), p.v_row_stride);
      sums.add_values(memory, stride, count, dim, row, column);
      __syncthreads();
    }
    write_rows(params.queries[tile.queries], dim, tile, sums, out_row, row, column);
  }
}

template <int VECTOR, int VECTORS>
void launch(const AttentionParams& params, int64_t most_tiles, int multiprocessors, cudaStream_t stream) {
  const int stride = row_stride(static_cast<int>(params.problem.head_dim));
  const size_t bytes = Memory::bytes(stride);
  const auto kernel = fp32_attention_kernel<VECTOR, VECTORS>;
  allow_shared_memory(kernel, bytes);
  constexpr int64_t kCtasOfMultiprocessor = 8;  // at most; fewer where there is no room, and they take turns
  const auto ctas =
      static_cast<unsigned>(std::min(most_tiles * kTilesOfAttentionTile, multiprocessors * kCtasOfMultiprocessor));
  kernel<<<ctas, kThreads, bytes, stream>>>(params, stride);
}

}  // namespace

void launch_attention_fp32(const AttentionParams& params, int64_t most_tiles, int multiprocessors,
                           cudaStream_t stream) {
  const int64_t dim = params.problem.head_dim;
  if (dim <= 32) {
    launch<2, 1>(params, most_tiles, multiprocessors, stream);
  } else if (dim <= 64) {
    launch<4, 1>(params, most_tiles, multiprocessors, stream);
  } else if (dim <= 128) {
    launch<4, 2>(params, most_tiles, multiprocessors, stream);
  } else {
    launch<4, 4>(params, most_tiles, multiprocessors, stream);
  }
  check_launch("target_attention");
}

}  // namespace ikbo::kernels
