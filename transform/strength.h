#pragma once

#include "graph/archive.h"

namespace ikbo::transform {

/// The same program with operators that give the same for less, whatever batch they end up at:
///   a matrix times columns         matmul(W, x (..., K, 1))         a linear layer: no copy of W for every row
///   a matrix a field               matmul(x (B, P, 1, K), W)        one product a field: no copy of W for every row
///   an outer product               matmul((..., M, 1), (..., 1, N)) an elementwise product
///   entries that a mask picks      masked_select(x, constant)       index_select at its positions, of known size
///   entries at known positions     x[:, constant]                   index_select
///   writes by row and column       x[0 0 .. 1 1 .., columns] = v    scatter, whose rows are independent
/// Products may be summed in another order. Constants that are new come as buffers.
enum class Strengths {
  kAll,
  kRows,  // masks, and writes by row and column, alone: what has no rows that a rule could know
};
graph::Archive reduce_strength(const graph::Archive& archive, Strengths wanted);

}  // namespace ikbo::transform
