// What every CUDA operator does around its kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <string_view>

#include "kernels/scalar_type.h"

namespace ikbo::cuda {

/// The device of `like` made current, and the caller's current stream on it.
class Call {
 public:
  /// Throws NotImplementedError unless the device is one that the kernels are built for.
  Call(std::string_view op, const at::Tensor& like);
  cudaStream_t stream() const { return stream_; }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
};

/// Of float64, float32, bfloat16 and float16.
kernels::ScalarType scalar_type_of(at::ScalarType type);

/// Candidates in user order, on the device: those of user u are order[begin[u]] ... order[begin[u + 1] - 1], ascending.
/// Candidates of users outside [0, num_users) are in no group. Nothing is read on the host.
struct Groups {
  at::Tensor order;  // int64 (B_cand)
  at::Tensor begin;  // int64 (num_users + 1)
};
Groups group_by_user(const at::Tensor& candidate_to_user, int64_t num_users);

}  // namespace ikbo::cuda
