// What the host hands to the tensor-core kernel of target attention, and what its launches tell each other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/target_attention.h"

namespace ikbo::kernels {

// Rows of one user's packed queries, (candidate, seed, query head of the group), that a CTA takes at a time.
constexpr int kTileRows = 128;

// One tile of work.
struct alignas(16) AttentionTile {
  int32_t user;  // or -1: candidates whose user does not exist
  int32_t kv_head;
  int32_t first_row;    // in the user's packed rows
  int32_t rows;         // 1 to kTileRows; 0: there is no more work
  int32_t order_begin;  // of the user's candidates in `order`
  int32_t kv_first;     // the history's first row, behind the user's own stride
  int32_t kv_length;
  int32_t unused;
};

struct AttentionHeader {
  uint32_t next_tile;
  uint32_t tile_count;
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
};

struct AttentionParams {
  TargetAttentionProblem problem;
  AttentionWorkspace workspace;
  int64_t rows_of_candidate;  // seeds times query heads of a group
  int32_t group;              // query heads of a key head
  bool rows_by_vectors;       // whether a row of `out` can be written 16 bytes at a time
  float scale_log2;           // of the logits, times log2(e)
  CUtensorMap k;              // (users, kv_heads, length, D), boxes of 64 elements by the keys of a block
  CUtensorMap v;
};

}  // namespace ikbo::kernels
