// Few candidates of few users: every CTA groups them for itself, in its own shared memory, which is done before a
// launch that does it for all would be over and seen. All come to the same list of tiles, since nothing in it depends
// on who came first.
#pragma once

#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_setup.cuh"
#include "kernels/tickets.cuh"

namespace ikbo::kernels {

// Whether tile `number` of the list is one of those that are listed with user u, and which of them it is then.
struct OwnTile {
  int32_t number;
  bool of_gap;
  bool found;
};
__device__ inline OwnTile find_tile(const OwnUser& user, int32_t number) {
  const auto place = static_cast<uint32_t>(number - user.tile_begin);
  const auto place_in_gap = static_cast<uint32_t>(number - user.gap_begin);
  const bool of_gap = place_in_gap < static_cast<uint32_t>(user.gap_tiles);
  return {static_cast<int32_t>(of_gap ? place_in_gap : place), of_gap,
          of_gap || place < static_cast<uint32_t>(user.tiles)};
}

__device__ inline AttentionTile tile_of_user(const Grouping& grouping, int32_t u, const OwnUser& user, OwnTile tile,
                                             bool self_is_void) {
  if (tile.of_gap) return grouping.tile_of_gap(u, self_is_void, grouping.gap(u, self_is_void), tile.number);
  return grouping.tile_of({u < grouping.users() ? u : -1,
                           user.begin,
                           user.rows,
                           grouping.self_rows(user.kv_length, self_is_void),
                           {user.kv_first, user.kv_length}},
                          tile.number);
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
  const bool self_is_void = __syncthreads_or(has_user && grouping.has_self() && grouping.decreases(thread)) != 0;
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
    const int32_t tiles = grouping.tiles_of(grouping.target_rows(count)) +
                          grouping.tiles_of(grouping.self_rows(history.length, self_is_void));
    const int32_t gap_tiles =
        grouping.has_self() ? grouping.tiles_of(grouping.rows_of_gap(grouping.gap(thread, self_is_void))) : 0;
    own.share[thread] = {count, tiles * kv_heads, bucket, gap_tiles * kv_heads};
  }
  __syncthreads();
  if (has_user) {
    int32_t begin = 0;
    int32_t tile_begin = 0;
    int32_t tiles = 0;
    int32_t gap_begin = 0;
    int32_t all_gaps = 0;
#pragma unroll 4
    for (int32_t u = 0; u <= users; ++u) {
      const OwnShare other = own.share[u];
      begin += u < thread ? other.candidates : 0;
      // Those of the longest histories are first.
      tile_begin += other.bucket > bucket || (other.bucket == bucket && u < thread) ? other.tiles : 0;
      tiles += other.tiles;
      gap_begin += u < thread ? other.gap_tiles : 0;
      all_gaps += other.gap_tiles;
    }
    const OwnUser user{tile_begin,
                       own.share[thread].tiles,
                       begin,
                       grouping.target_rows(count),
                       static_cast<int32_t>(history.first),
                       static_cast<int32_t>(history.length),
                       tiles + gap_begin,
                       own.share[thread].gap_tiles};
    own.user[thread] = user;
    const OwnTile tile = find_tile(user, static_cast<int32_t>(blockIdx.x));
    if (tile.found) first = tile_of_user(grouping, thread, user, tile, self_is_void);
    if (thread == 0) {
      own.tiles = tiles + all_gaps;
      own.self_is_void = self_is_void;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i >= steps) break;
    if (slot[i] < 0) continue;
    own.order[own.user[slot[i]].begin + own.counted[warp][slot[i]] + place[i]] = static_cast<uint16_t>(run + i * 32);
  }
}

// By a warp: tile `number` of the list, or one without rows behind its end.
__device__ inline AttentionTile tile_of_own_list(const AttentionParams& params, const OwnList& own, int32_t number) {
  const Grouping grouping{params};
  const int32_t users = grouping.users();
  for (int32_t first = 0; first <= users; first += 32) {
    const int32_t u = first + static_cast<int32_t>(threadIdx.x % 32);
    const uint32_t found = __ballot_sync(0xffff'ffff, u <= users && find_tile(own.user[min(u, users)], number).found);
    if (found == 0) continue;
    const int32_t owner = first + __ffs(static_cast<int>(found)) - 1;
    const OwnUser& user = own.user[owner];
    return tile_of_user(grouping, owner, user, find_tile(user, number), own.self_is_void);
  }
  return {};
}

}  // namespace ikbo::kernels
