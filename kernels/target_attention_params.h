// What the host hands to the tensor-core kernel of target attention, and what its launches tell each other.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kernels/divisor.h"
#include "kernels/row_windows.h"
#include "kernels/target_attention.h"

namespace ikbo::kernels {

// Rows of one user's packed queries, (candidate, seed, query head of the group) or (row of the history, query head of
// the group), that a CTA takes at a time, half of them a warpgroup. Where there are few, tiles of one half spread them
// over twice as many.
constexpr int kTileRows = 128;
constexpr int kHalfRows = kTileRows / 2;
constexpr int kWarpRows = kHalfRows / 4;

// One tile of work.
struct alignas(16) AttentionTile {
  int32_t user;  // or -1: candidates whose user does not exist
  int32_t kv_head;
  int32_t first_row;  // in the user's packed rows
  int32_t rows;       // 1 to tile_rows; 0: there is no more work
  int32_t begin;      // of the user's candidates in `order`, or of the rows of self_q, behind the user's own stride
  int32_t kv_first;   // the history's first row, behind the user's own stride
  int32_t kv_length;  // 0: no history; rows of a user that exists get zeros, others NaN
  int32_t queries;    // kTarget or kSelf
};

// Where rows of queries and results begin, and how results leave.
enum class RowPath {
  kDirect,     // at multiples of 16 bytes; straight from the registers
  kStaged,     // likewise; by the copy engine, from where their tile's queries were
  kUnaligned,  // anywhere; eight of a warp at a time, through shared memory
};

// Queries that tiles take their rows from.
constexpr int kTarget = 0;
constexpr int kSelf = 1;
struct AttentionQueries {
  const void* q;         // null: there are none
  const void* end;       // behind the last element of the last of them
  int64_t owner_stride;  // of a candidate, or of a user (0 where histories are packed)
  int64_t row_stride;    // of a seed, or of a row of the history
  int64_t head_stride;
  void* out;
  void* logsumexp;
  // Packed rows of a candidate or history, as a power of two, that tiles have as a whole. Of aligned rows, those of a
  // box of the map below, and below 0 where there is no map.
  int32_t piece_bits;
  int32_t out_piece_bits;  // the same of results of aligned rows, at most the 16 rows of a warp
  int32_t box_bits;        // of unaligned rows, those of a piece that are a box of the windows below; 0: there are none
  uint32_t rows_of_owner;  // seeds, or rows of a padded history (0 where histories are packed)
};

struct AttentionHeader {
  uint32_t next_tile;
  uint32_t tile_count;
  int32_t next_gap;      // place of the next tile of rows of self_q that belong to no history
  int32_t self_is_void;  // whether offsets decrease
  uint64_t tickets;      // in place of next_tile where CTAs list the users themselves (kernels/tickets.cuh)
};

// A user in a list of tiles by users, of at most so many of these and a place for candidates of none.
constexpr int kMostListedUsers = 128;
constexpr int kMostListedDim = 128;
struct alignas(16) ListedUser {
  int32_t tile_begin;
  int32_t tiles;
  int32_t begin;  // of its candidates in `order`
  int32_t rows;   // of them, packed
  int32_t kv_first;
  int32_t kv_length;
  int32_t gap_begin;  // of tiles of rows of self_q that belong to no history and are listed with the user's
  int32_t gap_tiles;
};

// Where users are few, a CTA works out of a short list of them what tile it has drawn; else all tiles are listed.
enum class TileList : int32_t {
  kTiles,
  kUsers,     // made by launches before
  kOwnUsers,  // made by every CTA
};

// Sections of the workspace.
struct AttentionWorkspace {
  AttentionHeader* header;
  int32_t* count;       // (users + 1): candidates of a user; the last one counts those of no user
  int32_t* begin;       // (users + 1)
  int32_t* cursor;      // (users + 1), where there are too many for shared memory
  int32_t* tile_begin;  // (users + 1)
  int32_t* order;       // (candidates), grouped by user
  AttentionTile* tiles;
  ListedUser* users;  // (kMostListedUsers + 1)
  int32_t* matrix;    // (kMostListedUsers + 1, CTAs) of candidates that a CTA counted
};

struct AttentionParams {
  TargetAttentionProblem problem;
  AttentionWorkspace workspace;
  AttentionQueries queries[2];  // kTarget, kSelf
  Divisor rows_of_candidate;    // seeds times query heads of a group
  Divisor group;                // query heads of a key head
  Divisor q_heads;
  int32_t tile_rows;     // kTileRows or kHalfRows
  bool rows_by_vectors;  // whether rows of the results can be written 16 bytes at a time
  bool takes_turns;      // whether a warpgroup waits for the other's scores before it asks for its own
  TileList list;
  float scale_log2;  // of the logits, times log2(e)
  CUtensorMap k;     // (users, kv_heads, length, D), boxes of 64 elements by the keys of a block
  CUtensorMap v;
  CUtensorMap q[2];    // kTarget, kSelf: (owners, rows of an owner, q_heads, D), boxes of 64 elements of packed rows
  CUtensorMap out[2];  // (rows of all owners, q_heads, D), likewise
};

// Where rows of queries do not begin at multiples of 16 bytes.
struct UnalignedAttentionParams : AttentionParams {
  RowWindows q_rows;  // of candidates
};
template <RowPath PATH>
using KernelParams = std::conditional_t<PATH == RowPath::kUnaligned, UnalignedAttentionParams, AttentionParams>;

}  // namespace ikbo::kernels
