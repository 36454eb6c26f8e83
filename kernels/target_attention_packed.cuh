// Where a row of a tile lies: the rows of one user and key head are packed, (candidate, seed, query head of the group).
#pragma once

#include "kernels/target_attention_params.h"

namespace ikbo::kernels {

constexpr uint32_t kNoRow = 0xffff'ffff;

template <typename T>
struct PackedRow {
  uint32_t out_row = kNoRow;  // of (candidates, seeds, q_heads), or kNoRow
  const T* query = nullptr;
};

template <typename T>
__device__ __forceinline__ PackedRow<T> locate_packed_row(const AttentionParams& params, const AttentionTile& tile,
                                                          int row) {
  if (row >= tile.rows) return {};
  const TargetAttentionProblem& p = params.problem;
  // 32 bits are enough: a user's rows are fewer than 2^31.
  const auto packed = static_cast<uint32_t>(tile.first_row + row);
  const auto rows_of_candidate = static_cast<uint32_t>(params.rows_of_candidate);
  const auto group = static_cast<uint32_t>(params.group);
  const uint32_t ordinal = packed / rows_of_candidate;
  const uint32_t within = packed - ordinal * rows_of_candidate;
  const uint32_t seed = within / group;
  const uint32_t head = static_cast<uint32_t>(tile.kv_head) * group + (within - seed * group);
  const auto candidate = static_cast<uint32_t>(params.workspace.order[tile.order_begin + ordinal]);
  return {
      (candidate * static_cast<uint32_t>(p.seeds) + seed) * static_cast<uint32_t>(p.q_heads) + head,
      static_cast<const T*>(p.q) + candidate * p.q_candidate_stride + seed * p.q_seed_stride + head * p.q_head_stride};
}

}  // namespace ikbo::kernels
