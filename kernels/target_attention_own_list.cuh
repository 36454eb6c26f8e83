// Few candidates of few users: every CTA groups them for itself, in its own shared memory, which is done before a
// launch that does it for all would be over and seen. All come to the same list of tiles, since nothing in it depends
// on who came first.
#pragma once

#include "kernels/hopper/tensor_copy.h"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_user_list.cuh"

namespace ikbo::kernels {

// By the whole CTA, which meets a barrier before the list is made.
template <typename Memory>
__device__ void clear_own_list(Memory& memory) {
  if (threadIdx.x == 0) memory.tile[0] = {};
  OwnScratch& scratch = memory.own_scratch();
  int32_t* const counted = &scratch.counted[0][0];
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(scratch.counted) / sizeof(int32_t));
       i += kAttentionThreads) {
    counted[i] = 0;
  }
}

// By the whole CTA, which meets a barrier before anybody reads the list. This CTA's first tile becomes tile[0].
template <typename Memory>
__device__ void make_own_list(const AttentionParams& params, Memory& memory) {
  OwnScratch& scratch = memory.own_scratch();
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / 32;
  const int32_t users = grouping.users();
  const auto candidates = static_cast<int32_t>(params.problem.candidates);
  const bool has_user = thread <= users;
  // Every warp has a run of candidates, and counts them in their order.
  const int32_t steps = (candidates + kAttentionThreads - 1) / kAttentionThreads;
  const int32_t run = warp * steps * 32 + thread % 32;
  int32_t slot[kOwnSteps];
  int32_t place[kOwnSteps];
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= steps) break;
    const int32_t b = run + i * 32;
    slot[i] = b < candidates ? grouping.slot_of(b) : -1;
  }
  const History history = has_user ? grouping.history(thread) : History{0, 0};
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= steps) break;
    place[i] = next_of(scratch.counted[warp], slot[i]);
  }
  const bool is_void = self_is_void(grouping);  // and a barrier
  if (has_user) {
    int32_t of_warp[kAttentionThreads / 32];
#pragma unroll
    for (int w = 0; w < kAttentionThreads / 32; ++w) of_warp[w] = scratch.counted[w][thread];
    int32_t count = 0;
#pragma unroll
    for (int w = 0; w < kAttentionThreads / 32; ++w) {
      scratch.counted[w][thread] = count;
      count += of_warp[w];
    }
    scratch.share[thread] = share_of_user(grouping, thread, count, history, is_void);
  }
  __syncthreads();
  if (has_user) {
    const auto [user, all_tiles] = place_user(grouping, thread, scratch.share, history);
    memory.own.user[thread] = user;
    const TileOfUser tile = find_tile(user, static_cast<int32_t>(blockIdx.x));
    if (tile.found) memory.tile[0] = tile_of_user(grouping, thread, user, tile, is_void);
    if (thread == 0) {
      memory.own.tiles = all_tiles;
      memory.own.self_is_void = is_void;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= steps) break;
    if (slot[i] < 0) continue;
    const int32_t begin = memory.own.user[slot[i]].begin + scratch.counted[warp][slot[i]];
    memory.own.order[begin + place[i]] = static_cast<uint16_t>(run + i * 32);
  }
  // Queries come by the copy engine to where the scratch is.
  hopper::fence_proxy_async_shared();
}

}  // namespace ikbo::kernels
