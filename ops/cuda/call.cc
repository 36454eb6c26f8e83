#include "ops/cuda/call.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace ikbo::cuda {

Call::Call(std::string_view op, const at::Tensor& like)
    : guard_(like.device()), stream_(c10::cuda::getCurrentCUDAStream(like.device().index())) {
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(like.device().index());
  TORCH_CHECK_NOT_IMPLEMENTED(properties->major == 9 && properties->minor == 0, op, ": ", like.device(), " is a ",
                              properties->name, " of compute capability ", properties->major, ".", properties->minor,
                              "; the CUDA operators are built for Hopper, 9.0");
}

kernels::ScalarType scalar_type_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return kernels::ScalarType::kFloat64;
    case at::kFloat:
      return kernels::ScalarType::kFloat32;
    case at::kBFloat16:
      return kernels::ScalarType::kBFloat16;
    case at::kHalf:
      return kernels::ScalarType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "no kernel for dtype ", type);
  }
}

Groups group_by_user(const at::Tensor& candidate_to_user, int64_t num_users) {
  const at::Tensor index = candidate_to_user.contiguous();
  if (index.numel() == 0) {
    const auto options = index.options().dtype(at::kLong);
    return {at::empty({0}, options), at::zeros({num_users + 1}, options)};
  }
  auto [sorted, order] = at::sort(index, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  return {order, at::searchsorted(sorted, at::arange(num_users + 1, index.options()))};
}

}  // namespace ikbo::cuda
