#pragma once

#include "graph/archive.h"

namespace ikbo::transform {

/// The same program, where a linear layer over a multiple of other rows is taken before the multiplication:
///
///   W (a x + c) = a (W x) + W c            a: one number a row; c: one vector for all rows
///
/// A cross network x' = x0 (x . w) + b + x (Deep & Cross Network, Wang et al. 2017) never leaves this form, x = a x0 +
/// c, so that all its layers and the one behind it are numbers a row and one product of x0, which x0's parts take at
/// their own batches. Sums are taken in another order: for fp32 and fp64 only.
graph::Archive multiply_last(const graph::Archive& archive);

}  // namespace ikbo::transform
