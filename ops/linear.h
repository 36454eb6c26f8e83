// What the forward and the backward operator of ikbo::linear share.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "ops/cpu/row_linear.h"

namespace ikbo {

/// The tensor arguments of ikbo::linear; sizes and meaning as in its schema.
struct LinearTensors {
  const at::Tensor& x_cand;               // (B, K_cand)
  const at::Tensor& w_cand;               // (N, K_cand)
  at::TensorList x_bcast;                 // each (B_t, K_t)
  at::TensorList w_bcast;                 // each (N, K_t)
  at::TensorList index;                   // each int32 (B)
  const std::optional<at::Tensor>& bias;  // (N)
};

/// Throws ValueError for a name that is none of: none, relu, sigmoid, tanh, silu, gelu.
cpu::Activation parse_activation(std::string_view op, std::string_view name);

/// Whether the derivative of the activation is a function of its result, so that nothing else need be kept.
bool derivative_from_output(cpu::Activation activation);

/// float64 for float64, float32 for the others: the type sums are kept in.
at::ScalarType sum_type(at::ScalarType type);

/// Checks types, devices and (symbolic) sizes of all tensors against each other; not the index values.
void check_linear(std::string_view op, const LinearTensors& tensors);

/// The result on the CPU, (B, N), in the type of x_cand or, with `keep_sum_type`, unrounded in sum_type.
/// Throws IndexError for an index value out of range.
at::Tensor compute_linear_cpu(std::string_view op, const LinearTensors& tensors, cpu::Activation activation,
                              bool keep_sum_type);

/// torch.ops.ikbo.linear_backward through the dispatcher. Results in the order x_cand, w_cand, bias, x_bcast...,
/// w_bcast...; one that `output_mask` (same order) does not ask for is an empty tensor.
std::vector<at::Tensor> call_linear_backward(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                                             const LinearTensors& tensors, std::string_view activation,
                                             const c10::List<bool>& output_mask);

/// The same gradients from differentiable operators: the graph of a double backward, and what CUDA runs. Those that
/// `output_mask` does not ask for are undefined.
std::vector<at::Tensor> differentiable_linear_backward(const at::Tensor& grad, const LinearTensors& tensors,
                                                       cpu::Activation activation, const c10::List<bool>& output_mask);

}  // namespace ikbo
