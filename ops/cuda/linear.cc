// ikbo::linear on CUDA: every user's part once, unrounded, and the candidates' own; an epilogue adds what it looks up.
#include "ops/linear.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "kernels/finish_sums.h"
#include "ops/cuda/aligned_rows.h"
#include "ops/cuda/call.h"
#include "ops/cuda/library_product.h"

namespace ikbo::cuda {
namespace {

constexpr const char* kLinear = "ikbo::linear";

kernels::Activation activation_of(cpu::Activation activation) {
  switch (activation) {
    case cpu::Activation::kNone:
      return kernels::Activation::kNone;
    case cpu::Activation::kRelu:
      return kernels::Activation::kRelu;
    case cpu::Activation::kSigmoid:
      return kernels::Activation::kSigmoid;
    case cpu::Activation::kTanh:
      return kernels::Activation::kTanh;
    case cpu::Activation::kSilu:
      return kernels::Activation::kSilu;
    case cpu::Activation::kGelu:
      return kernels::Activation::kGelu;
  }
  return kernels::Activation::kNone;
}

at::Tensor linear_cuda(const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                       at::TensorList w_bcast, at::TensorList index, const std::optional<at::Tensor>& bias,
                       std::string_view activation) {
  const LinearTensors tensors{x_cand, w_cand, x_bcast, w_bcast, index, bias};
  const cpu::Activation parsed = parse_activation(kLinear, activation);
  check_linear(kLinear, tensors);
  const Call call(kLinear, x_cand);
  at::Tensor out = at::empty({x_cand.size(0), w_cand.size(0)}, x_cand.options());
  if (out.numel() == 0) return out;
  std::vector<Matrix> operands = {{x_cand, false}, {w_cand, true}};
  for (size_t t = 0; t < x_bcast.size(); ++t) {
    operands.push_back({x_bcast[t], false});
    operands.push_back({w_bcast[t], true});
  }
  const std::vector<at::Tensor> regular = enlarged(operands, call.stream());
  const at::Tensor sums = row_product(regular[0], regular[1]);
  kernels::FinishSums job{.type = scalar_type_of(x_cand.scalar_type()),
                          .out_type = scalar_type_of(out.scalar_type()),
                          .candidates = out.size(0),
                          .columns = out.size(1),
                          .row_stride = sums.size(1),
                          .sums = sums.const_data_ptr(),
                          .activation = activation_of(parsed),
                          .out = out.mutable_data_ptr()};
  std::vector<at::Tensor> kept;
  for (size_t t = 0; t < x_bcast.size(); ++t) {
    const at::Tensor user_sums = row_product(regular[2 * t + 2], regular[2 * t + 3]);
    const at::Tensor dense_index = index[t].contiguous();
    job.terms.push_back({user_sums.const_data_ptr(), user_sums.size(0), dense_index.const_data_ptr<int32_t>()});
    kept.insert(kept.end(), {user_sums, dense_index});
  }
  at::Tensor dense_bias;
  if (bias.has_value()) {
    dense_bias = bias->contiguous();
    job.bias = dense_bias.const_data_ptr();
  }
  kernels::finish_sums(job, call.stream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear", linear_cuda);
}

}  // namespace ikbo::cuda
