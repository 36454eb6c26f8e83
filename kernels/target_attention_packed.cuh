// Where a row of a tile lies: the rows of one user and key head are packed, (candidate, seed, query head of the group),
// or (row of the history, query head of the group).
#pragma once

#include "kernels/target_attention_params.h"

namespace ikbo::kernels {

constexpr uint32_t kNoRow = 0xffff'ffff;

// A row of a tile among all of its queries.
struct PackedPlace {
  uint32_t owner;  // candidate or user
  uint32_t query;  // seed or row of the history
  uint32_t head;
};

template <typename T>
struct PackedRow {
  uint32_t out_row = kNoRow;  // of the result without D, or kNoRow
  const T* query = nullptr;
};

// Rows behind the tile's last are taken for that. Without a branch, so that the look-ups of several rows run at once.
// candidate_at(i) is candidate i of those that are grouped by user.
template <typename CandidateAt>
__device__ __forceinline__ PackedPlace place_packed_row(const AttentionParams& params, CandidateAt&& candidate_at,
                                                        const AttentionTile& tile, int row) {
  const bool is_target = tile.queries == kTarget;
  // 32 bits are enough: a user's rows are fewer than 2^31.
  const auto packed = static_cast<uint32_t>(tile.first_row + min(row, tile.rows - 1));
  const uint32_t group = params.group.divisor;
  const uint32_t ordinal = is_target ? params.rows_of_candidate.quotient(packed) : 0;
  const uint32_t within = packed - ordinal * params.rows_of_candidate.divisor;
  const uint32_t query = params.group.quotient(within);
  return {static_cast<uint32_t>(is_target ? candidate_at(tile.begin + ordinal) : tile.user),
          query + (is_target ? 0 : static_cast<uint32_t>(tile.begin)),
          static_cast<uint32_t>(tile.kv_head) * group + (within - query * group)};
}

template <typename T>
__device__ __forceinline__ PackedRow<T> packed_row_at(const AttentionParams& params, const AttentionTile& tile, int row,
                                                      const PackedPlace& place) {
  const auto row_of = [&](const AttentionQueries& queries) -> PackedRow<T> {
    return {(place.owner * queries.rows_of_owner + place.query) * static_cast<uint32_t>(params.problem.q_heads) +
                place.head,
            static_cast<const T*>(queries.q) + place.owner * queries.owner_stride + place.query * queries.row_stride +
                place.head * queries.head_stride};
  };
  if (row >= tile.rows) return {};
  // An index that is only known at run time would load each value when it is wanted.
  return tile.queries == kTarget ? row_of(params.queries[kTarget]) : row_of(params.queries[kSelf]);
}

// Unaligned rows of a piece of packed ones that lie a multiple of 16 bytes apart are a box. So boxes have rows that are
// as many places apart as there are boxes in a piece: which of the packed rows is row `row` of a half, where boxes
// follow each other.
__device__ __forceinline__ int row_in_boxes(int row, int piece_bits, int box_bits) {
  const int in_piece = row & ((1 << piece_bits) - 1);
  const int in_box = row & ((1 << box_bits) - 1);
  return row - in_piece + (in_box << (piece_bits - box_bits)) + (in_piece >> box_bits);
}

template <typename T>
__device__ __forceinline__ PackedRow<T> locate_packed_row(const AttentionParams& params, const AttentionTile& tile,
                                                          int row) {
  const auto candidate_at = [&](uint32_t i) { return params.workspace.order[i]; };
  return packed_row_at<T>(params, tile, row, place_packed_row(params, candidate_at, tile, row));
}

}  // namespace ikbo::kernels
