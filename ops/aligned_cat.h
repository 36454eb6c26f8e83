// What the implementations of ikbo::aligned_cat share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ikbo {

struct AlignedCat {
  at::Tensor out;   // not written yet; the storage holds the padding of the last row too
  int64_t dim = 0;  // from 0
};

/// Checks the arguments of ikbo::aligned_cat and makes its result.
AlignedCat empty_aligned_cat(at::TensorList tensors, int64_t dim);

}  // namespace ikbo
