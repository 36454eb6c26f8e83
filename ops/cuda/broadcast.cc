// ikbo::broadcast and its transpose on CUDA.
#include "ops/broadcast.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "kernels/rows.h"
#include "ops/cuda/call.h"

namespace ikbo::cuda {
namespace {

struct Fill {
  uint64_t bits;
  int bytes;
};

// NaN for what has one; zeros for integers and flags, which no later lookup can trip over.
Fill fill_of(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kHalf:
      return {0x7e00, 2};
    case at::kBFloat16:
      return {0x7fc0, 2};
    case at::kFloat:
      return {0x7fc0'0000, 4};
    case at::kDouble:
      return {0x7ff8'0000'0000'0000, 8};
    default:
      return {0, 1};
  }
}

at::Tensor broadcast_cuda(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  check_broadcast(x_user, candidate_to_user);
  const Call call("ikbo::broadcast", x_user);
  const at::Tensor index = candidate_to_user.contiguous();
  std::vector<int64_t> sizes = x_user.sizes().vec();
  sizes[0] = index.numel();
  at::Tensor out = at::empty(sizes, x_user.options());
  if (out.numel() == 0) return out;
  const at::Tensor rows = x_user.size(0) > 0 ? with_dense_rows(x_user) : x_user;
  const auto item = static_cast<int64_t>(x_user.element_size());
  const Fill fill = fill_of(x_user.scalar_type());
  kernels::look_up_rows({.from = rows.const_data_ptr(),
                         .rows = rows.size(0),
                         .row_bytes = out.numel() / index.numel() * item,
                         .row_stride = rows.stride(0) * item,
                         .index = index.const_data_ptr<int32_t>(),
                         .count = index.numel(),
                         .out = out.mutable_data_ptr(),
                         .fill = fill.bits,
                         .fill_bytes = fill.bytes},
                        call.stream());
  return out;
}

at::Tensor broadcast_backward_cuda(const at::Tensor& grad, const at::Tensor& candidate_to_user, int64_t num_users) {
  check_broadcast_backward(grad, candidate_to_user, num_users);
  const Call call("ikbo::broadcast_backward", grad);
  std::vector<int64_t> sizes = grad.sizes().vec();
  sizes[0] = num_users;
  at::Tensor out = at::empty(sizes, grad.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out;
  const at::Tensor values = grad.contiguous();
  const Groups groups = group_by_user(candidate_to_user, num_users);
  kernels::sum_rows_by_user({.type = scalar_type_of(grad.scalar_type()),
                             .values = values.const_data_ptr(),
                             .features = c10::multiply_integers(sizes.begin() + 1, sizes.end()),
                             .order = groups.order.const_data_ptr<int64_t>(),
                             .begin = groups.begin.const_data_ptr<int64_t>(),
                             .users = num_users,
                             .out = out.mutable_data_ptr()},
                            call.stream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("broadcast", broadcast_cuda);
  m.impl("broadcast_backward", broadcast_backward_cuda);
}

}  // namespace ikbo::cuda
