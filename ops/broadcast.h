// What the implementations of ikbo::broadcast and its transpose share.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ikbo {

/// Checks types, devices and (symbolic) sizes of the arguments of ikbo::broadcast; not the index values.
void check_broadcast(const at::Tensor& x_user, const at::Tensor& candidate_to_user);

/// The same for ikbo::broadcast_backward.
void check_broadcast_backward(const at::Tensor& grad, const at::Tensor& candidate_to_user,
                              const c10::SymInt& num_users);

/// `tensor`, copied only where the inside of a row is not dense: a slice of columns of an expanded or strided batch is
/// read in place. It has at least one row.
at::Tensor with_dense_rows(const at::Tensor& tensor);

/// The sizes of `tensor` with another number of rows.
std::vector<c10::SymInt> with_rows(const at::Tensor& tensor, c10::SymInt rows);

}  // namespace ikbo
