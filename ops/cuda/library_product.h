// Products through cuBLASLt whose rows do not know of each other.
//
// A library chooses its kernel by the sizes of a call, and with it the order of additions, so that a candidate alone
// and the same candidate in a batch differ in their last bits. Here the kernel is chosen once for the sizes that a
// model fixes, at a batch that is always the same, without splitting K, and serves every batch: each element is then
// one chain of sums in the same order. Operands are brought to one layout first where theirs is another, so that
// strides do not matter either.
#pragma once

#include <ATen/core/Tensor.h>

namespace ikbo::cuda {

/// x w^T, unrounded: x (rows, K), w (N, K), as `enlarged` returns them -> (rows, N) in the type that sums are kept in.
/// On the current stream; nothing is read on the host.
at::Tensor row_product(const at::Tensor& x, const at::Tensor& w);

/// w e[b], unrounded: w (M, K), e (rows, K, N), any strides -> (rows, M, N). As above.
at::Tensor stack_product(const at::Tensor& w, const at::Tensor& e);

}  // namespace ikbo::cuda
