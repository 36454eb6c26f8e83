// ikbo::linear on CUDA: every user's part once, unrounded, then the candidates with those looked up in the epilogue.
#include "ops/linear.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "kernels/matrix_product.h"
#include "ops/cuda/call.h"

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

// x W^T into `out`, (rows of x, rows of w).
kernels::MatrixProduct product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& out) {
  return {.type = scalar_type_of(x.scalar_type()),
          .out_type = scalar_type_of(out.scalar_type()),
          .m = x.size(0),
          .n = w.size(0),
          .k = x.size(1),
          .a = x.const_data_ptr(),
          .a_row_stride = x.stride(0),
          .a_column_stride = x.stride(1),
          .b = w.const_data_ptr(),
          .b_row_stride = w.stride(1),
          .b_column_stride = w.stride(0),
          .out = out.mutable_data_ptr()};
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
  kernels::MatrixProduct job = product(x_cand, w_cand, out);
  std::vector<at::Tensor> kept;
  for (size_t t = 0; t < x_bcast.size(); ++t) {
    const at::Tensor sums =
        at::empty({x_bcast[t].size(0), w_cand.size(0)}, x_cand.options().dtype(sum_type(x_cand.scalar_type())));
    kernels::matrix_product(product(x_bcast[t], w_bcast[t], sums), call.stream());
    const at::Tensor dense_index = index[t].contiguous();
    job.terms.push_back({sums.const_data_ptr(), sums.size(0), dense_index.const_data_ptr<int32_t>()});
    kept.insert(kept.end(), {sums, dense_index});
  }
  at::Tensor dense_bias;
  if (bias.has_value()) {
    dense_bias = bias->contiguous();
    job.bias = dense_bias.const_data_ptr();
  }
  job.index_by_row = true;
  job.activation = activation_of(parsed);
  kernels::matrix_product(job, call.stream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear", linear_cuda);
}

}  // namespace ikbo::cuda
