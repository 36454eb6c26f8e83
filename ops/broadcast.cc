// ikbo::broadcast: rows looked up through the index, and its transpose, the sum of candidates' rows by user.
#include "ops/broadcast.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "ops/checks.h"
#include "ops/segment_sum.h"

namespace ikbo {
namespace {

constexpr const char* kBroadcast = "ikbo::broadcast";
constexpr const char* kBackward = "ikbo::broadcast_backward";

}  // namespace

std::vector<c10::SymInt> with_rows(const at::Tensor& tensor, c10::SymInt rows) {
  std::vector<c10::SymInt> sizes = tensor.sym_sizes().vec();
  sizes[0] = std::move(rows);
  return sizes;
}

void check_broadcast(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  check_dense(kBroadcast, x_user, "x_user", x_user, "x_user");
  TORCH_CHECK_VALUE(x_user.dim() >= 1, kBroadcast, ": x_user has no dimensions, expected (B_user, ...)");
  check_index(kBroadcast, candidate_to_user, "candidate_to_user", x_user, "x_user");
}

void check_broadcast_backward(const at::Tensor& grad, const at::Tensor& candidate_to_user,
                              const c10::SymInt& num_users) {
  check_dense(kBackward, grad, "grad", grad, "grad");
  check_floating(kBackward, grad, "grad");
  TORCH_CHECK_VALUE(grad.dim() >= 1, kBackward, ": grad has no dimensions, expected (B_cand, ...)");
  check_index(kBackward, candidate_to_user, "candidate_to_user", grad, "grad");
  IKBO_CHECK_SIZE(grad.sym_size(0).sym_eq(candidate_to_user.sym_size(0)), kBackward, ": candidate_to_user has ",
                  candidate_to_user.sym_size(0), " values, expected ", grad.sym_size(0), ", the rows of grad");
  IKBO_CHECK_SIZE(num_users.sym_ge(0), kBackward, ": num_users is ", num_users, ", expected 0 or more");
}

at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.select(0, 0).is_contiguous() ? tensor : tensor.contiguous();
}

namespace {

// A copy whose size the compiler knows is one load and one store; rows of ids, flags and scalars are that short.
template <typename Row>
void copy_rows(const char* from, int64_t from_stride, const int32_t* index, int64_t begin, int64_t end, char* to) {
  for (int64_t b = begin; b < end; ++b) {
    std::memcpy(to + b * static_cast<int64_t>(sizeof(Row)), from + index[b] * from_stride, sizeof(Row));
  }
}

at::Tensor broadcast_cpu(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  check_broadcast(x_user, candidate_to_user);
  const at::Tensor index = candidate_to_user.contiguous();
  const int64_t users = x_user.size(0);
  check_index_values(kBroadcast, index, "candidate_to_user", users, "x_user");
  const int64_t batch = index.numel();
  std::vector<int64_t> sizes = x_user.sizes().vec();
  sizes[0] = batch;
  at::Tensor out = at::empty(sizes, x_user.options());
  if (out.numel() == 0) return out;
  const at::Tensor rows = with_dense_rows(x_user);
  const auto item = static_cast<int64_t>(rows.element_size());
  const int64_t row_bytes = out.numel() / batch * item;
  const int64_t stride = rows.stride(0) * item;
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int32_t* user = index.const_data_ptr<int32_t>();
  at::parallel_for(0, batch, std::max<int64_t>(1, 32768 / row_bytes), [&](int64_t begin, int64_t end) {
    switch (row_bytes) {
      case 1:
        return copy_rows<char[1]>(from, stride, user, begin, end, to);
      case 2:
        return copy_rows<char[2]>(from, stride, user, begin, end, to);
      case 4:
        return copy_rows<char[4]>(from, stride, user, begin, end, to);
      case 8:
        return copy_rows<char[8]>(from, stride, user, begin, end, to);
      default:
        for (int64_t b = begin; b < end; ++b) {
          std::memcpy(to + b * row_bytes, from + user[b] * stride, static_cast<size_t>(row_bytes));
        }
    }
  });
  return out;
}

at::Tensor broadcast_meta(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  check_broadcast(x_user, candidate_to_user);
  return at::empty_symint(with_rows(x_user, candidate_to_user.sym_size(0)), x_user.options());
}

at::Tensor broadcast_backward_cpu(const at::Tensor& grad, const at::Tensor& candidate_to_user, int64_t num_users) {
  check_broadcast_backward(grad, candidate_to_user, num_users);
  const at::Tensor index = candidate_to_user.contiguous();
  check_index_values(kBackward, index, "candidate_to_user", num_users, "the result");
  std::vector<int64_t> sizes = grad.sizes().vec();
  sizes[0] = num_users;
  int64_t features = 1;
  for (size_t d = 1; d < sizes.size(); ++d) features *= sizes[d];
  const auto sum_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor rows = grad.reshape({index.numel(), features}).to(sum_type).contiguous();
  return segment_sum(rows, group_by_user(index, num_users)).to(grad.scalar_type()).view(sizes);
}

at::Tensor broadcast_backward_meta(const at::Tensor& grad, const at::Tensor& candidate_to_user, c10::SymInt num_users) {
  check_broadcast_backward(grad, candidate_to_user, num_users);
  return at::empty_symint(with_rows(grad, std::move(num_users)), grad.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("broadcast", broadcast_cpu);
  m.impl("broadcast_backward", broadcast_backward_cpu);
}

TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("broadcast", broadcast_meta);
  m.impl("broadcast_backward", broadcast_backward_meta);
}

}  // namespace ikbo
