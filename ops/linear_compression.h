// What the forward and the backward operator of ikbo::linear_compression share.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace ikbo {

/// The tensor arguments of ikbo::linear_compression; sizes and meaning as in its schema.
struct CompressionTensors {
  const at::Tensor& w_cand;  // (M, K_cand)
  const at::Tensor& e_cand;  // (B, K_cand, N)
  at::TensorList w_bcast;    // each (M, K_t)
  at::TensorList e_bcast;    // each (B_t, K_t, N)
  at::TensorList index;      // each int32 (B)
};

/// Checks types, devices and (symbolic) sizes of all tensors against each other; not the index values.
void check_linear_compression(std::string_view op, const CompressionTensors& tensors);

/// The element type of the result; throws TypeError for an `out_dtype` other than that of e_cand or the one that sums
/// are kept in.
at::ScalarType linear_compression_type(const at::Tensor& e_cand, std::optional<at::ScalarType> out_dtype);

/// torch.ops.ikbo.linear_compression_backward through the dispatcher. Results in the order w_cand, e_cand, w_bcast...,
/// e_bcast...; one that `output_mask` (same order) does not ask for is an empty tensor.
std::vector<at::Tensor> call_linear_compression_backward(const at::Tensor& grad, const CompressionTensors& tensors,
                                                         const c10::List<bool>& output_mask);

/// The same gradients from differentiable operators: what the operator above runs, and the graph of a double backward.
std::vector<at::Tensor> differentiable_linear_compression_backward(const at::Tensor& grad,
                                                                   const CompressionTensors& tensors,
                                                                   const c10::List<bool>& output_mask);

}  // namespace ikbo
