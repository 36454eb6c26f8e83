// Lists of tiles by users, where these are few: so short that every CTA can search them, and need not be written out.
#pragma once

#include "kernels/hopper/launch.h"
#include "kernels/hopper/sync.h"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_setup.cuh"

namespace ikbo::kernels {

// Whether tile `number` of the list is one of those that are listed with a user, and which of them it is then.
struct TileOfUser {
  int32_t number;
  bool of_gap;
  bool found;
};
__device__ inline TileOfUser find_tile(const ListedUser& user, int32_t number) {
  const auto place = static_cast<uint32_t>(number - user.tile_begin);
  const auto place_in_gap = static_cast<uint32_t>(number - user.gap_begin);
  const bool of_gap = place_in_gap < static_cast<uint32_t>(user.gap_tiles);
  return {static_cast<int32_t>(of_gap ? place_in_gap : place), of_gap,
          of_gap || place < static_cast<uint32_t>(user.tiles)};
}

__device__ inline AttentionTile tile_of_user(const Grouping& grouping, int32_t u, const ListedUser& user,
                                             TileOfUser tile, bool self_is_void) {
  if (tile.of_gap) return grouping.tile_of_gap(u, self_is_void, grouping.gap(u, self_is_void), tile.number);
  return grouping.tile_of({u < grouping.users() ? u : -1,
                           user.begin,
                           user.rows,
                           grouping.self_rows(user.kv_length, self_is_void),
                           {user.kv_first, user.kv_length}},
                          tile.number);
}

// By a warp: tile `number` of the list, or one without rows behind its end.
__device__ inline AttentionTile tile_of_users(const AttentionParams& params, const ListedUser* listed, int32_t number,
                                              bool self_is_void) {
  const Grouping grouping{params};
  const int32_t users = grouping.users();
  for (int32_t first = 0; first <= users; first += 32) {
    const int32_t u = first + static_cast<int32_t>(threadIdx.x % 32);
    const uint32_t found = __ballot_sync(0xffff'ffff, u <= users && find_tile(listed[min(u, users)], number).found);
    if (found == 0) continue;
    const int32_t owner = first + __ffs(static_cast<int>(found)) - 1;
    const ListedUser user = listed[owner];
    return tile_of_user(grouping, owner, user, find_tile(user, number), self_is_void);
  }
  return {};
}

// What others need to know of a user to find the places of their own.
struct alignas(16) UserShare {
  int32_t candidates;
  int32_t tiles;
  int32_t bucket;  // of the length of its history
  int32_t gap_tiles;
};

__device__ inline UserShare share_of_user(const Grouping& grouping, int32_t u, int32_t count, const History& history,
                                          bool self_is_void) {
  const auto kv_heads = static_cast<int32_t>(grouping.params.problem.kv_heads);
  const int32_t tiles = grouping.tiles_of(grouping.target_rows(count)) +
                        grouping.tiles_of(grouping.self_rows(history.length, self_is_void));
  const int32_t gap_tiles =
      grouping.has_self() ? grouping.tiles_of(grouping.rows_of_gap(grouping.gap(u, self_is_void))) : 0;
  return {count, tiles * kv_heads, bucket_of(history.length), gap_tiles * kv_heads};
}

// User u in the list, and the number of tiles of all, once every share is known.
struct UserPlace {
  ListedUser user;
  int32_t all_tiles;
};
__device__ inline UserPlace place_user(const Grouping& grouping, int32_t u, const UserShare* share,
                                       const History& history) {
  const UserShare own = share[u];
  int32_t begin = 0;
  int32_t tile_begin = 0;
  int32_t tiles = 0;
  int32_t gap_begin = 0;
  int32_t all_gaps = 0;
#pragma unroll 4
  for (int32_t i = 0; i <= grouping.users(); ++i) {
    const UserShare other = share[i];
    begin += i < u ? other.candidates : 0;
    // Those of the longest histories are first.
    tile_begin += other.bucket > own.bucket || (other.bucket == own.bucket && i < u) ? other.tiles : 0;
    tiles += other.tiles;
    gap_begin += i < u ? other.gap_tiles : 0;
    all_gaps += other.gap_tiles;
  }
  return {{tile_begin, own.tiles, begin, grouping.target_rows(own.candidates), static_cast<int32_t>(history.first),
           static_cast<int32_t>(history.length), tiles + gap_begin, own.gap_tiles},
          tiles + all_gaps};
}

// Whether no row of self_q is any history's; by a whole CTA.
__device__ inline bool self_is_void(const Grouping& grouping) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  return __syncthreads_or(thread <= grouping.users() && grouping.has_self() && grouping.decreases(thread)) != 0;
}

// Many candidates are counted by one launch and sorted by the next, by so many CTAs, each with its share of them. A
// matrix (users + 1, CTAs) of counts needs no clearing before, and says what every CTA's places are.
constexpr int kMatrixCtas = 128;

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_matrix_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ int32_t counter[kMostListedUsers + 1];
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  count_share(grouping, counter, share_of(params));
  if (thread <= grouping.users()) params.workspace.matrix[thread * kMatrixCtas + blockIdx.x] = counter[thread];
}

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_sort_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ int32_t counter[kMostListedUsers + 1];
  __shared__ int32_t count[kMostListedUsers + 1];
  __shared__ UserShare share[kMostListedUsers + 1];
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32;
  const bool has_user = thread <= grouping.users();
  const History history = has_user ? grouping.history(thread) : History{0, 0};
  for (int32_t u = thread / 32; u <= grouping.users(); u += kSetupThreads / 32) {
    static_assert(kMatrixCtas == 32 * 4, "a vector a lane");
    const int4 own = __ldcg(reinterpret_cast<const int4*>(params.workspace.matrix + u * kMatrixCtas) + lane);
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int32_t sum = own.x + own.y + own.z + own.w;
    // Of the CTAs before this one.
    const int32_t before = (lane * 4 < cta ? own.x : 0) + (lane * 4 + 1 < cta ? own.y : 0) +
                           (lane * 4 + 2 < cta ? own.z : 0) + (lane * 4 + 3 < cta ? own.w : 0);
    const auto all = static_cast<int32_t>(__reduce_add_sync(0xffff'ffff, static_cast<uint32_t>(sum)));
    const auto all_before = static_cast<int32_t>(__reduce_add_sync(0xffff'ffff, static_cast<uint32_t>(before)));
    if (lane == 0) {
      count[u] = all;
      counter[u] = all_before;
    }
  }
  const bool is_void = self_is_void(grouping);  // and a barrier
  if (has_user) share[thread] = share_of_user(grouping, thread, count[thread], history, is_void);
  __syncthreads();
  if (has_user) {
    const auto [user, all_tiles] = place_user(grouping, thread, share, history);
    counter[thread] += user.begin;
    if (blockIdx.x == 0) params.workspace.users[thread] = user;
    if (blockIdx.x == 0 && thread == 0) {
      *params.workspace.header = {0, static_cast<uint32_t>(all_tiles), 0, is_void ? 1 : 0, 0};
    }
  }
  __syncthreads();
  const Share candidates = share_of(params);
  grouping.place(counter, candidates.first, candidates.last);
}

inline void list_users_of_many(const AttentionParams& params, cudaStream_t stream) {
  hopper::launch_early(attention_matrix_kernel, kMatrixCtas, kSetupThreads, 0, stream, params);
  hopper::launch_early(attention_sort_kernel, kMatrixCtas, kSetupThreads, 0, stream, params);
  check_launch("target_attention");
}

}  // namespace ikbo::kernels
