// The CPU arithmetic of ikbo::target_attention: the queries of one user's candidates, packed, over that user's history.
//
// Both products are row_linear.h's, whose rows do not know of each other, and the softmax folds blocks of a fixed
// number of keys in order: a candidate has the same bits alone, in any batch and in any order.
#pragma once

#include <cstdint>

#include "ops/cpu/row_linear.h"

namespace ikbo::cpu {

/// The queries of one user that share a head of keys, and where their results go. Row r is query head r % group of seed
/// (r / group) % seeds of candidate candidates[r / (group * seeds)]; rows of q and out are `D` contiguous elements in
/// out, strided in q. Strides are in elements.
template <typename T>
struct AttentionTask {
  using Acc = AccOf<T>;
  const T* q;  // of the first query head of this key head
  int64_t q_candidate_stride;
  int64_t q_seed_stride;
  int64_t q_head_stride;
  int64_t q_col_stride;
  const int64_t* candidates;  // positions in the batch
  int64_t seeds;
  int64_t group;  // query heads that share a key head
  int64_t dim;    // D
  const Acc* k;   // (length, D) of this user and key head
  int64_t k_row_stride;
  int64_t k_col_stride;
  const Acc* v;
  int64_t v_row_stride;
  int64_t v_col_stride;
  int64_t length;
  Acc scale;
  T* out;              // as q, rows of D contiguous elements
  int64_t out_stride;  // of a candidate; seeds and heads are contiguous below
  int64_t out_heads;   // heads of out: seed s of query head h stands at (s * out_heads + h) * D
  Acc* logsumexp;      // (B_cand, seeds, out_heads), or null
};

/// Rows of a task that `attend` takes at once.
inline constexpr int64_t kAttentionRows = 96;

/// Computes rows [row, row + rows) of the task, at most kAttentionRows.
template <typename T>
void attend(const AttentionTask<T>& task, int64_t row, int64_t rows);

}  // namespace ikbo::cpu
