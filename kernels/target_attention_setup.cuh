// Grouping of candidates by user and the list of tiles, on the device, so that nothing is read on the host and a
// captured graph serves any mapping and any lengths. One CTA does it all; where there are many candidates, more of them
// count and sort, in launches of their own. (Few users: kernels/target_attention_user_list.cuh.)
#pragma once

#include "kernels/hopper/launch.h"
#include "kernels/hopper/sync.h"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_rows.cuh"

namespace ikbo::kernels {

constexpr int kSetupThreads = 1024;
constexpr int kCountersInShared = 4096;
constexpr int kUsersInShared = 2048;  // of whom one CTA keeps all it works out in shared memory
constexpr int64_t kCandidatesOfOneCta = 16384;
constexpr int kBuckets = 256;  // of histories of like length: the longest are dealt first

// Longer histories have larger numbers; eight buckets from one power of two to the next.
__device__ inline int bucket_of(int64_t length) {
  const auto size = static_cast<uint32_t>(length / 8 + 8);
  const int exponent = 31 - __clz(static_cast<int>(size));
  return (exponent - 3) * 8 + static_cast<int>(size >> (exponent - 3) & 7);
}

struct Pair {
  int32_t first, second;
  __device__ Pair operator+(const Pair& other) const { return {first + other.first, second + other.second}; }
};

// The sums of `value` over the threads before this one; `total` is those over all.
__device__ inline Pair exclusive_sums(Pair value, Pair* scratch, Pair& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto up = [](Pair from, int offset) {
    return Pair{__shfl_up_sync(0xffff'ffff, from.first, offset), __shfl_up_sync(0xffff'ffff, from.second, offset)};
  };
  const auto at = [](Pair from, int of) {
    return Pair{__shfl_sync(0xffff'ffff, from.first, of), __shfl_sync(0xffff'ffff, from.second, of)};
  };
  const auto scan = [&](Pair inclusive) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Pair before = up(inclusive, offset);
      if (lane >= offset) inclusive = inclusive + before;
    }
    return inclusive;
  };
  const Pair inclusive = scan(value);
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  static_assert(kSetupThreads == 32 * 32, "a warp scans the sums of all warps");
  const Pair of_warps = scan(scratch[lane]);
  total = at(of_warps, 31);
  const Pair base = at(of_warps, max(warp - 1, 0));
  const Pair own{inclusive.first - value.first, inclusive.second - value.second};
  return warp == 0 ? own : base + own;
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

// What a user's tiles are made of.
struct UserTiles {
  int32_t user;         // -1: candidates of no user
  int32_t begin;        // of its candidates in `order`
  int32_t target_rows;  // packed rows of its candidates
  int32_t self_rows;    // and of its history
  History history;
};

// What is worked out of each user, in shared memory or in the workspace.
struct UserTable {
  int32_t* count;       // candidates
  int32_t* begin;       // of its candidates in `order`
  int32_t* tile_begin;  // of its tiles
};

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
  // Packed rows of a user's candidates, and of its history where that attends to itself.
  __device__ int32_t target_rows(int32_t count) const {
    return count * static_cast<int32_t>(params.rows_of_candidate.divisor);
  }
  __device__ int32_t self_rows(int64_t length, bool is_void) const {
    return has_self() && !is_void ? static_cast<int32_t>(length) * static_cast<int32_t>(params.group.divisor) : 0;
  }
  static __device__ int32_t whole(int32_t rows, int32_t of) { return rows / of + (rows % of != 0 ? 1 : 0); }
  __device__ int32_t tiles_of(int32_t rows) const {
    return params.tile_rows == kTileRows ? whole(rows, kTileRows) : whole(rows, kHalfRows);
  }
  // Those of a key head follow each other, so that keys stay in the cache.
  __device__ AttentionTile tile_of(const UserTiles& of, int32_t t) const {
    const int32_t target_tiles = tiles_of(of.target_rows);
    const int32_t tiles = target_tiles + tiles_of(of.self_rows);
    const int32_t head = t / tiles;
    const int32_t number = t - head * tiles;
    const bool self = number >= target_tiles;
    const int32_t row = (self ? number - target_tiles : number) * params.tile_rows;
    const auto kv_first = static_cast<int32_t>(of.history.first);
    return {of.user,
            head,
            row,
            min(params.tile_rows, (self ? of.self_rows : of.target_rows) - row),
            self ? kv_first : of.begin,
            kv_first,
            static_cast<int32_t>(of.history.length),
            self ? kSelf : kTarget};
  }
  __device__ bool has_self() const { return params.queries[kSelf].q != nullptr; }

  // Whether offsets decrease between a user and the next: whose a row of self_q is, they do not say then.
  __device__ bool decreases(int32_t user) const {
    const int32_t* const offsets = params.problem.kv_offsets;
    return offsets != nullptr && user < users() && offsets[user + 1] < offsets[user];
  }
  // Rows of self_q that belong to no history: behind a user's padded one; in front of all packed ones, listed with the
  // first user's, and behind them, listed with those of no user.
  __device__ History gap(int32_t user, bool is_void) const {
    const TargetAttentionProblem& p = params.problem;
    const bool is_last = user == users();
    if (p.kv_offsets == nullptr) {
      const int64_t end = is_last ? p.length : history(user).length;
      return {end, p.length - end};
    }
    if (is_void) return {0, is_last ? p.length : 0};
    const int64_t first = is_last && user > 0 ? clamp_to(p.kv_offsets[user], 0, p.length) : 0;
    const int64_t end = is_last ? p.length : (user == 0 ? clamp_to(p.kv_offsets[0], 0, p.length) : 0);
    return {first, end - first};
  }
  __device__ UserTable table() const {
    return {params.workspace.count, params.workspace.begin, params.workspace.tile_begin};
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

  // By one CTA: turns counts into places, the first candidate and the first tile of each user, and writes the header.
  // length_of(u) is the history's.
  template <typename LengthOf>
  __device__ void scan(const UserTable& table, LengthOf&& length_of) const {
    __shared__ Pair scratch[kSetupThreads / 32];
    __shared__ int32_t bucket[kBuckets];
    __shared__ int32_t gap_tiles;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < kBuckets) bucket[thread] = 0;
    if (thread == 0) gap_tiles = 0;
    // Each thread has a run of users.
    const int32_t run = (users() + kSetupThreads) / kSetupThreads;
    const int32_t first = min(thread * run, users() + 1);
    const int32_t last = min(first + run, users() + 1);
    const auto kv_heads = static_cast<int32_t>(params.problem.kv_heads);
    bool is_void = false;
    if (has_self()) {
      for (int32_t u = first; u < last && !is_void; ++u) is_void = decreases(u);
      is_void = __syncthreads_or(is_void) != 0;
    } else {
      __syncthreads();
    }
    const auto tiles_of_user = [&](int32_t count, int64_t length) {
      return (tiles_of(target_rows(count)) + tiles_of(self_rows(length, is_void))) * kv_heads;
    };
    int32_t own = 0;
    for (int32_t u = first; u < last; ++u) {
      const int32_t count = table.count[u];
      own += count;
      const int64_t length = length_of(u);
      const int32_t tiles = tiles_of_user(count, length);
      if (tiles > 0) atomicAdd(&bucket[bucket_of(length)], tiles);
      if (has_self()) {
        const int32_t more = tiles_of(rows_of_gap(gap(u, is_void))) * kv_heads;
        if (more > 0) atomicAdd(&gap_tiles, more);
      }
    }
    __syncthreads();
    const bool has_bucket = thread < kBuckets;
    Pair total{};
    const Pair before = exclusive_sums({own, has_bucket ? bucket[kBuckets - 1 - thread] : 0}, scratch, total);
    if (has_bucket) bucket[kBuckets - 1 - thread] = before.second;
    __syncthreads();
    int32_t at = before.first;
    for (int32_t u = first; u < last; ++u) {
      const int32_t count = table.count[u];
      table.begin[u] = at;
      at += count;
      const int64_t length = length_of(u);
      const int32_t tiles = tiles_of_user(count, length);
      if (tiles > 0) table.tile_begin[u] = atomicAdd(&bucket[bucket_of(length)], tiles);
    }
    if (thread == 0) {
      *params.workspace.header = {0, static_cast<uint32_t>(total.second + gap_tiles), total.second, is_void ? 1 : 0};
    }
  }

  // One warp a user, or several where there are fewer users, write its tiles. history_at(u) is the history. The header
  // is there.
  template <typename HistoryAt>
  __device__ void list_tiles(const UserTable& table, HistoryAt&& history_at, int32_t warp, int32_t warps) const {
    const int32_t warps_of_user = max(warps / (users() + 1), 1);
    const int32_t lane = warp % warps_of_user * 32 + static_cast<int32_t>(threadIdx.x % 32);
    const auto kv_heads = static_cast<int32_t>(params.problem.kv_heads);
    const bool is_void = has_self() && params.workspace.header->self_is_void != 0;
    for (int32_t u = warp / warps_of_user; u <= users(); u += warps / warps_of_user) {
      const History own = history_at(u);
      const UserTiles of{u < users() ? u : -1, table.begin[u], target_rows(table.count[u]),
                         self_rows(own.length, is_void), own};
      const int32_t tiles = (tiles_of(of.target_rows) + tiles_of(of.self_rows)) * kv_heads;
      for (int32_t t = lane; t < tiles; t += 32 * warps_of_user) {
        params.workspace.tiles[table.tile_begin[u] + t] = tile_of(of, t);
      }
      if (lane < 32 && has_self()) list_gap(u, is_void);
    }
  }

  __device__ int32_t rows_of_gap(const History& gap) const {
    return static_cast<int32_t>(gap.length) * static_cast<int32_t>(params.group.divisor);
  }
  __device__ AttentionTile tile_of_gap(int32_t user, bool is_void, const History& gap, int32_t t) const {
    const int32_t rows = rows_of_gap(gap);
    const int32_t tiles = tiles_of(rows);
    const int32_t head = t / tiles;
    const int32_t row = (t - head * tiles) * params.tile_rows;
    return {is_void ? -1 : user,
            head,
            row,
            min(params.tile_rows, rows - row),
            static_cast<int32_t>(gap.first),
            0,
            0,
            kSelf};
  }

  // By a warp: the tiles of a gap, wherever there is room behind all others.
  __device__ void list_gap(int32_t user, bool is_void) const {
    const History of = gap(user, is_void);
    const int32_t all = tiles_of(rows_of_gap(of)) * static_cast<int32_t>(params.problem.kv_heads);
    if (all == 0) return;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t first = 0;
    if (lane == 0) first = atomicAdd(&params.workspace.header->next_gap, all);
    first = __shfl_sync(0xffff'ffff, first, 0);
    for (int32_t t = lane; t < all; t += 32) {
      params.workspace.tiles[first + t] = tile_of_gap(user, is_void, of, t);
    }
  }
};

// All of it by one CTA. What a warp counts of a candidate's user before it is the candidate's place among that user's.
// KEPT: what is worked out of the users stays in shared memory.
template <bool KEPT>
__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_setup_kernel(const __grid_constant__ AttentionParams params) {
  constexpr int kMost = KEPT ? kUsersInShared : 1;
  constexpr int kCandidatesOfThread = kCandidatesOfOneCta / kSetupThreads;
  __shared__ int32_t count[kMost], begin[kMost], tile_begin[kMost], kv_first[kMost], kv_length[kMost];
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
  const Grouping grouping{params};
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto candidates = static_cast<int32_t>(params.problem.candidates);
  int32_t slot[kCandidatesOfThread];
  int32_t place[kCandidatesOfThread];
#pragma unroll
  for (int i = 0; i < kCandidatesOfThread; ++i) {
    const int32_t b = i * kSetupThreads + thread;
    slot[i] = b < candidates ? grouping.slot_of(b) : -1;
  }
  const UserTable table = KEPT ? UserTable{count, begin, tile_begin} : grouping.table();
  const auto history_at = [&](int32_t u) { return KEPT ? History{kv_first[u], kv_length[u]} : grouping.history(u); };
  for (int32_t u = thread; u <= grouping.users(); u += kSetupThreads) {
    table.count[u] = 0;
    if constexpr (KEPT) {
      const History own = grouping.history(u);
      kv_first[u] = static_cast<int32_t>(own.first);
      kv_length[u] = static_cast<int32_t>(own.length);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCandidatesOfThread; ++i) {
    if (i * kSetupThreads < candidates) place[i] = next_of(table.count, slot[i]);
  }
  __syncthreads();
  grouping.scan(table, [&](int32_t u) { return history_at(u).length; });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCandidatesOfThread; ++i) {
    if (slot[i] >= 0) params.workspace.order[table.begin[slot[i]] + place[i]] = i * kSetupThreads + thread;
  }
  grouping.list_tiles(table, history_at, thread / 32, kSetupThreads / 32);
}

// The same in steps, the first and the last by many CTAs, each with its share of the candidates, which it counts in
// shared memory first where there is room.
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

__global__ __launch_bounds__(kSetupThreads,
                             1) void attention_clear_kernel(const __grid_constant__ AttentionParams params) {
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
  for (auto u = static_cast<int32_t>(threadIdx.x); u <= Grouping{params}.users(); u += kSetupThreads) {
    params.workspace.cursor[u] = 0;
  }
}

__global__ void attention_count_kernel(const __grid_constant__ AttentionParams params) {
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
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
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
  // Counts become places in `cursor`, which the next launch counts on from.
  const Grouping grouping{params};
  UserTable table = grouping.table();
  for (auto u = static_cast<int32_t>(threadIdx.x); u <= grouping.users(); u += kSetupThreads) {
    table.count[u] = params.workspace.cursor[u];
  }
  __syncthreads();
  grouping.scan(table, [&](int32_t u) { return grouping.history(u).length; });
  __syncthreads();
  for (auto u = static_cast<int32_t>(threadIdx.x); u <= grouping.users(); u += kSetupThreads) {
    params.workspace.cursor[u] = table.begin[u];
  }
}

__global__ void attention_place_kernel(const __grid_constant__ AttentionParams params) {
  hopper::grid_dependency_launch();
  hopper::grid_dependency_wait();
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
  grouping.list_tiles(
      grouping.table(), [&](int32_t u) { return grouping.history(u); }, thread / 32, threads / 32);
}

inline void set_up_attention(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  if (params.problem.candidates <= kCandidatesOfOneCta) {
    if (params.problem.users < kUsersInShared) {
      hopper::launch_early(attention_setup_kernel<true>, 1, kSetupThreads, 0, stream, params);
    } else {
      hopper::launch_early(attention_setup_kernel<false>, 1, kSetupThreads, 0, stream, params);
    }
  } else {
    constexpr int kThreadsOfStep = 256;
    hopper::launch_early(attention_clear_kernel, 1, kSetupThreads, 0, stream, params);
    hopper::launch_early(attention_count_kernel, 2 * multiprocessors, kThreadsOfStep, 0, stream, params);
    hopper::launch_early(attention_scan_kernel, 1, kSetupThreads, 0, stream, params);
    hopper::launch_early(attention_place_kernel, 2 * multiprocessors, kThreadsOfStep, 0, stream, params);
  }
  check_launch("target_attention");
}

}  // namespace ikbo::kernels
