// Grouping of candidates by user and the list of tiles, on the device, so that nothing is read on the host and a
// captured graph serves any mapping and any lengths. One CTA does it all; where there are many candidates, more of them
// count and sort, in launches of their own.
#pragma once

#include "kernels/hopper/sync.h"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {

constexpr int kSetupThreads = 1024;
constexpr int kCountersInShared = 4096;
constexpr int64_t kCandidatesOfOneCta = 16384;
constexpr int kBuckets = 256;  // of histories of like length: the longest are dealt first

// Longer histories have larger numbers; eight buckets from one power of two to the next.
__device__ inline int bucket_of(int64_t length) {
  const auto size = static_cast<uint32_t>(length / 8 + 8);
  const int exponent = 31 - __clz(static_cast<int>(size));
  return (exponent - 3) * 8 + static_cast<int>(size >> (exponent - 3) & 7);
}

// The sum of `value` over the threads before this one; `total` is that over all.
__device__ inline int32_t exclusive_sum(int32_t value, int32_t* scratch, int32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int32_t inclusive = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t before = __shfl_up_sync(0xffff'ffff, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  static_assert(kSetupThreads == 32 * 32, "a warp scans the sums of all warps");
  int32_t of_warps = scratch[lane];
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t before = __shfl_up_sync(0xffff'ffff, of_warps, offset);
    if (lane >= offset) of_warps += before;
  }
  total = __shfl_sync(0xffff'ffff, of_warps, 31);
  const int32_t base = __shfl_sync(0xffff'ffff, of_warps, max(warp - 1, 0));
  __syncthreads();
  return (warp == 0 ? 0 : base) + inclusive - value;
}

// Adds one to the counter of each lane's slot, with one atomic for the lanes that share it, and returns what each lane
// would have found. All lanes of the warp come here; a slot below 0 counts nowhere.
__device__ inline int32_t next_of(int32_t* counter, int32_t slot) {
  const uint32_t same = __match_any_sync(0xffff'ffff, slot);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int leader = __ffs(static_cast<int>(same)) - 1;
  int32_t first = 0;
  if (lane == leader && slot >= 0) first = atomicAdd(&counter[slot], __popc(same));
  first = __shfl_sync(0xffff'ffff, first, leader);
  return first + __popc(same & ((1u << lane) - 1));
}

// Users, and behind them a place for the candidates whose user does not exist.
struct Grouping {
  const AttentionParams& params;

  __device__ int32_t users() const { return static_cast<int32_t>(params.problem.users); }
  __device__ int32_t slot_of(int32_t candidate) const {
    const int32_t user = params.problem.candidate_to_user[candidate];
    return user >= 0 && user < users() ? user : users();
  }
  __device__ History history(int32_t user) const {
    return user < users() ? history_of(params.problem, user) : History{0, 0};
  }
  __device__ int32_t row_tiles(int32_t count) const {
    return static_cast<int32_t>((count * params.rows_of_candidate + kTileRows - 1) / kTileRows);
  }

  // The candidates [first, last) are counted into, or given their places by, one counter a user; by a whole CTA.
  __device__ void count(int32_t* counter, int32_t first, int32_t last) const {
    for (int32_t base = first; base < last; base += static_cast<int32_t>(blockDim.x)) {
      const int32_t b = base + static_cast<int32_t>(threadIdx.x);
      next_of(counter, b < last ? slot_of(b) : -1);
    }
  }
  // The order of a user's candidates decides where their rows lie, not what becomes of them.
  __device__ void place(int32_t* counter, int32_t first, int32_t last) const {
    for (int32_t base = first; base < last; base += static_cast<int32_t>(blockDim.x)) {
      const int32_t b = base + static_cast<int32_t>(threadIdx.x);
      const int32_t at = next_of(counter, b < last ? slot_of(b) : -1);
      if (b < last) params.workspace.order[at] = b;
    }
  }

  // By one CTA: turns counts into places, the first candidate and the first tile of each user.
  __device__ void scan(int32_t* counter) const {
    __shared__ int32_t scratch[kSetupThreads / 32];
    __shared__ int32_t bucket[kBuckets];
    const AttentionWorkspace& w = params.workspace;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < kBuckets) bucket[thread] = 0;
    // Each thread sums a run of users.
    const int32_t run = (users() + kSetupThreads) / kSetupThreads;
    const int32_t first = min(thread * run, users() + 1);
    const int32_t last = min(first + run, users() + 1);
    int32_t own = 0;
    for (int32_t u = first; u < last; ++u) own += counter[u];
    int32_t total = 0;
    int32_t at = exclusive_sum(own, scratch, total);
    const auto kv_heads = static_cast<int32_t>(params.problem.kv_heads);
    for (int32_t u = first; u < last; ++u) {
      const int32_t count = counter[u];
      w.count[u] = count;
      w.begin[u] = at;
      counter[u] = at;
      at += count;
      if (count > 0) atomicAdd(&bucket[bucket_of(history(u).length)], row_tiles(count) * kv_heads);
    }
    __syncthreads();
    const int32_t own_bucket = thread < kBuckets ? bucket[kBuckets - 1 - thread] : 0;
    const int32_t bucket_begin = exclusive_sum(own_bucket, scratch, total);
    if (thread < kBuckets) bucket[kBuckets - 1 - thread] = bucket_begin;
    __syncthreads();
    for (int32_t u = first; u < last; ++u) {
      const int32_t count = w.count[u];
      if (count > 0) w.tile_begin[u] = atomicAdd(&bucket[bucket_of(history(u).length)], row_tiles(count) * kv_heads);
    }
    if (thread == 0) *w.header = {0, static_cast<uint32_t>(total)};
  }

  // One warp a user writes its tiles: those of a key head follow each other, so that keys stay in the cache.
  __device__ void list_tiles(int32_t first_warp, int32_t warps) const {
    const AttentionWorkspace& w = params.workspace;
    for (int32_t u = first_warp; u <= users(); u += warps) {
      const int32_t count = w.count[u];
      if (count == 0) continue;
      const History own = history(u);
      const auto rows = static_cast<int32_t>(count * params.rows_of_candidate);
      const int32_t tiles = row_tiles(count);
      for (int32_t t = static_cast<int32_t>(threadIdx.x % 32); t < tiles * params.problem.kv_heads; t += 32) {
        const int32_t row = t % tiles * kTileRows;
        w.tiles[w.tile_begin[u] + t] = {u < users() ? u : -1,
                                        t / tiles,
                                        row,
                                        min(kTileRows, rows - row),
                                        w.begin[u],
                                        static_cast<int32_t>(own.first),
                                        static_cast<int32_t>(own.length),
                                        0};
      }
    }
  }
};

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_setup_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ int32_t shared_counter[kCountersInShared];
  hopper::grid_dependency_launch();
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  int32_t* const counter = grouping.users() < kCountersInShared ? shared_counter : params.workspace.cursor;
  for (int32_t u = thread; u <= grouping.users(); u += kSetupThreads) counter[u] = 0;
  __syncthreads();
  const auto candidates = static_cast<int32_t>(params.problem.candidates);
  grouping.count(counter, 0, candidates);
  __syncthreads();
  grouping.scan(counter);
  __syncthreads();
  grouping.place(counter, 0, candidates);
  grouping.list_tiles(thread / 32, kSetupThreads / 32);
}

// The same in steps, the first and the last by many CTAs, each with its share of the candidates, which it counts in
// shared memory first where there is room. The counters were set to zero.
struct Share {
  int32_t first;
  int32_t last;
};
__device__ inline Share share_of(const AttentionParams& params) {
  const int64_t candidates = params.problem.candidates;
  return {static_cast<int32_t>(candidates * blockIdx.x / gridDim.x),
          static_cast<int32_t>(candidates * (blockIdx.x + 1) / gridDim.x)};
}

// This CTA's share counted in `shared_counter`.
__device__ inline void count_share(const Grouping& grouping, int32_t* shared_counter, Share share) {
  for (auto u = static_cast<int32_t>(threadIdx.x); u <= grouping.users(); u += static_cast<int32_t>(blockDim.x)) {
    shared_counter[u] = 0;
  }
  __syncthreads();
  grouping.count(shared_counter, share.first, share.last);
  __syncthreads();
}

__global__ void attention_count_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ int32_t shared_counter[kCountersInShared];
  const Grouping grouping{params};
  const Share share = share_of(params);
  if (grouping.users() >= kCountersInShared) {
    grouping.count(params.workspace.cursor, share.first, share.last);
    return;
  }
  count_share(grouping, shared_counter, share);
  for (auto u = static_cast<int32_t>(threadIdx.x); u <= grouping.users(); u += static_cast<int32_t>(blockDim.x)) {
    if (shared_counter[u] > 0) atomicAdd(&params.workspace.cursor[u], shared_counter[u]);
  }
}

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_scan_kernel(const __grid_constant__ AttentionParams params) {
  Grouping{params}.scan(params.workspace.cursor);
}

__global__ void attention_place_kernel(const __grid_constant__ AttentionParams params) {
  hopper::grid_dependency_launch();
  const auto thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int32_t>(gridDim.x * blockDim.x);
  __shared__ int32_t shared_counter[kCountersInShared];
  const Grouping grouping{params};
  const Share share = share_of(params);
  if (grouping.users() >= kCountersInShared) {
    grouping.place(params.workspace.cursor, share.first, share.last);
  } else {
    count_share(grouping, shared_counter, share);
    for (auto u = static_cast<int32_t>(threadIdx.x); u <= grouping.users(); u += static_cast<int32_t>(blockDim.x)) {
      if (shared_counter[u] > 0) shared_counter[u] = atomicAdd(&params.workspace.cursor[u], shared_counter[u]);
    }
    __syncthreads();
    grouping.place(shared_counter, share.first, share.last);
  }
  grouping.list_tiles(thread / 32, threads / 32);
}

inline void set_up_attention(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  if (params.problem.candidates <= kCandidatesOfOneCta) {
    attention_setup_kernel<<<1, kSetupThreads, 0, stream>>>(params);
  } else {
    constexpr int kThreadsOfStep = 256;
    const auto bytes = static_cast<size_t>(params.problem.users + 1) * sizeof(int32_t);
    if (cudaMemsetAsync(params.workspace.cursor, 0, bytes, stream) != cudaSuccess) check_launch("target_attention");
    attention_count_kernel<<<2 * multiprocessors, kThreadsOfStep, 0, stream>>>(params);
    attention_scan_kernel<<<1, kSetupThreads, 0, stream>>>(params);
    attention_place_kernel<<<2 * multiprocessors, kThreadsOfStep, 0, stream>>>(params);
  }
  check_launch("target_attention");
}

}  // namespace ikbo::kernels
