// Few candidates of few users: every CTA groups them for itself, in its own shared memory, which is done before a
// launch that does it for all would be over and seen. All come to the same list of tiles, since nothing in it depends
// on who came first.
#pragma once

#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_setup.cuh"
#include "kernels/tickets.cuh"

namespace ikbo::kernels {

__device__ inline AttentionTile tile_of_user(const Grouping& grouping, int32_t u, const OwnUser& user, int32_t number) {
  return grouping.tile_of({u < grouping.users() ? u : -1, user.begin, user.rows, 0, {user.kv_first, user.kv_length}},
                          number);
}

// By the whole CTA, which meets a barrier before the list is made.
__device__ inline void clear_own_list(OwnList& own, AttentionTile& first) {
  if (threadIdx.x == 0) first = {};
  int32_t* const counted = &own.counted[0][0];
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(own.counted) / sizeof(int32_t));
       i += kAttentionThreads) {
    counted[i] = 0;
  }
}

// By the whole CTA, which meets a barrier before anybody reads the list. `first` becomes this CTA's first tile.
__device__ inline void make_own_list(const AttentionParams& params, OwnList& own, AttentionTile& first) {
  constexpr int kSteps = (kMostOwnCandidates + kAttentionThreads - 1) / kAttentionThreads;
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t users = grouping.users();
  const auto candidates = static_cast<int32_t>(params.problem.candidates);
  const auto kv_heads = static_cast<int32_t>(params.problem.kv_heads);
  const bool has_user = thread <= users;
  // Every warp has a run of candidates, and counts them in their order.
  const int32_t steps = (candidates + kAttentionThreads - 1) / kAttentionThreads;
  const int32_t run = warp * steps * 32 + thread % 32;
  int32_t slot[kSteps];
  int32_t place[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i >= steps) break;
    const int32_t b = run + i * 32;
    slot[i] = b < candidates ? grouping.slot_of(b) : -1;
  }
  const History history = has_user ? grouping.history(thread) : History{0, 0};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i >= steps) break;
    place[i] = next_of(own.counted[warp], slot[i]);
  }
  __syncthreads();
  const int32_t bucket = bucket_of(history.length);
  int32_t count = 0;
  if (has_user) {
    int32_t of_warp[kAttentionThreads / 32];
#pragma unroll
    for (int w = 0; w < kAttentionThreads / 32; ++w) of_warp[w] = own.counted[w][thread];
#pragma unroll
    for (int w = 0; w < kAttentionThreads / 32; ++w) {
      own.counted[w][thread] = count;
      count += of_warp[w];
    }
    own.share[thread] = {count, grouping.tiles_of(grouping.target_rows(count)) * kv_heads, bucket};
  }
  __syncthreads();
  if (has_user) {
    int32_t begin = 0;
    int32_t tile_begin = 0;
    int32_t tiles = 0;
#pragma unroll 4
    for (int32_t u = 0; u <= users; ++u) {
      const OwnShare other = own.share[u];
      begin += u < thread ? other.candidates : 0;
      // Those of the longest histories are first.
      tile_begin += other.bucket > bucket || (other.bucket == bucket && u < thread) ? other.tiles : 0;
      tiles += other.tiles;
    }
    const OwnUser user{tile_begin,
                       own.share[thread].tiles,
                       begin,
                       grouping.target_rows(count),
                       static_cast<int32_t>(history.first),
                       static_cast<int32_t>(history.length)};
    own.user[thread] = user;
    const int32_t number = static_cast<int32_t>(blockIdx.x) - tile_begin;
    if (number >= 0 && number < user.tiles) first = tile_of_user(grouping, thread, user, number);
    if (thread == 0) own.tiles = tiles;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i >= steps) break;
    if (slot[i] >= 0)
      own.order[own.user[slot[i]].begin + own.counted[warp][slot[i]] + place[i]] = static_cast<uint16_t>(run + i * 32);
  }
}

// By a warp: tile `number` of the list, or one without rows behind its end.
__device__ inline AttentionTile tile_of_own_list(const AttentionParams& params, const OwnList& own, int32_t number) {
  const Grouping grouping{params};
  const int32_t users = grouping.users();
  for (int32_t first = 0; first <= users; first += 32) {
    const int32_t u = first + static_cast<int32_t>(threadIdx.x % 32);
    const int32_t place = u <= users ? number - own.user[u].tile_begin : -1;
    const uint32_t found = __ballot_sync(0xffff'ffff, place >= 0 && place < own.user[min(u, users)].tiles);
    if (found == 0) continue;
    const int32_t owner = first + __ffs(static_cast<int>(found)) - 1;
    const OwnUser& user = own.user[owner];
    return tile_of_user(grouping, owner, user, number - user.tile_begin);
  }
  return {};
}

}  // namespace ikbo::kernels
