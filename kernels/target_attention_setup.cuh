// Grouping of candidates by user and the list of tiles, on the device: one CTA, so that nothing is read on the host and
// a captured graph serves any mapping and any lengths.
#pragma once

#include "kernels/target_attention_params.h"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {

constexpr int kSetupThreads = 1024;
constexpr int kCountersInShared = 4096;
constexpr int kBuckets = 256;  // of histories of like length: the longest are dealt first

// Longer histories have larger numbers; eight buckets from one power of two to the next.
__device__ inline int bucket_of(int32_t length) {
  const uint32_t size = static_cast<uint32_t>(length) / 8 + 8;
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
  int32_t base = 0;
  total = 0;
  for (int w = 0; w < kSetupThreads / 32; ++w) {
    if (w == warp) base = total;
    total += scratch[w];
  }
  __syncthreads();
  return base + inclusive - value;
}

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_setup_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ int32_t scratch[kSetupThreads / 32];
  __shared__ int32_t bucket[kBuckets];
  __shared__ int32_t shared_counter[kCountersInShared];
  const TargetAttentionProblem& p = params.problem;
  const AttentionWorkspace& w = params.workspace;
  const auto users = static_cast<int32_t>(p.users);
  const auto candidates = static_cast<int32_t>(p.candidates);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto slot_of = [&](int32_t candidate) {
    const int32_t user = p.candidate_to_user[candidate];
    return user >= 0 && user < users ? user : users;
  };
  const auto history = [&](int32_t user) { return user < users ? history_of(p, user) : History{0, 0}; };
  const auto tiles_of = [&](int32_t user) {
    const int64_t rows = w.count[user] * params.rows_of_candidate;
    return static_cast<int32_t>((rows + kTileRows - 1) / kTileRows * p.kv_heads);
  };

  for (int32_t u = thread; u <= users; u += kSetupThreads) w.count[u] = 0;
  if (thread < kBuckets) bucket[thread] = 0;
  __syncthreads();
  for (int32_t b = thread; b < candidates; b += kSetupThreads) atomicAdd(&w.count[slot_of(b)], 1);
  __syncthreads();

  // Each thread sums a run of users.
  const int32_t run = (users + kSetupThreads) / kSetupThreads;
  const int32_t first = min(thread * run, users + 1);
  const int32_t last = min(first + run, users + 1);
  int32_t own = 0;
  for (int32_t u = first; u < last; ++u) own += w.count[u];
  int32_t total = 0;
  int32_t at = exclusive_sum(own, scratch, total);
  for (int32_t u = first; u < last; ++u) {
    w.begin[u] = at;
    w.cursor[u] = at;
    at += w.count[u];
    if (w.count[u] > 0) atomicAdd(&bucket[bucket_of(static_cast<int32_t>(history(u).length))], tiles_of(u));
  }
  __syncthreads();
  const int32_t own_bucket = thread < kBuckets ? bucket[kBuckets - 1 - thread] : 0;
  const int32_t bucket_begin = exclusive_sum(own_bucket, scratch, total);
  if (thread < kBuckets) bucket[kBuckets - 1 - thread] = bucket_begin;
  __syncthreads();
  for (int32_t u = first; u < last; ++u) {
    if (w.count[u] > 0) {
      w.tile_begin[u] = atomicAdd(&bucket[bucket_of(static_cast<int32_t>(history(u).length))], tiles_of(u));
    }
  }
  // The order of a user's candidates decides where their rows lie, not what becomes of them.
  for (int32_t b = thread; b < candidates; b += kSetupThreads) w.order[atomicAdd(&w.cursor[slot_of(b)], 1)] = b;
  if (thread == 0) *w.header = {0, static_cast<uint32_t>(total)};
  __syncthreads();

  for (int32_t u = thread / 32; u <= users; u += kSetupThreads / 32) {
    if (w.count[u] == 0) continue;
    const History own_history = history(u);
    const auto rows = static_cast<int32_t>(w.count[u] * params.rows_of_candidate);
    const int32_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int32_t t = thread % 32; t < tiles * static_cast<int32_t>(p.kv_heads); t += 32) {
      const int32_t row = t % tiles * kTileRows;
      w.tiles[w.tile_begin[u] + t] = {u < users ? u : -1,
                                      t / tiles,
                                      row,
                                      min(kTileRows, rows - row),
                                      w.begin[u],
                                      static_cast<int32_t>(own_history.first),
                                      static_cast<int32_t>(own_history.length),
                                      0};
    }
  }
}

}  // namespace ikbo::kernels
