// Gradients of ikbo::linear_compression. No replicated tensor: a user's gradient is the sum over its candidates, taken
// before anything is multiplied by a weight.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensordot.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/linear.h"
#include "ops/linear_compression.h"

namespace ikbo {
namespace {

constexpr const char* kBackward = "ikbo::linear_compression_backward";

void check_backward(const at::Tensor& grad, const CompressionTensors& tensors, const c10::List<bool>& output_mask) {
  check_linear_compression(kBackward, tensors);
  check_dense(kBackward, grad, "grad", tensors.e_cand, "e_cand");
  check_floating(kBackward, grad, "grad");
  check_dim(kBackward, grad, "grad", 3, "(B_cand, M, N)");
  const c10::SymInt expected[] = {tensors.e_cand.sym_size(0), tensors.w_cand.sym_size(0), tensors.e_cand.sym_size(2)};
  for (int64_t d = 0; d < 3; ++d) {
    IKBO_CHECK_SIZE(grad.sym_size(d).sym_eq(expected[d]), kBackward, ": grad has shape ", grad.sym_sizes(),
                    ", expected ", expected[d], " in dimension ", d);
  }
  const size_t results = 2 + 2 * tensors.w_bcast.size();
  TORCH_CHECK_VALUE(output_mask.size() == results, kBackward, ": output_mask has ", output_mask.size(),
                    " values, expected ", results, " (w_cand, e_cand, w_bcast..., e_bcast...)");
}

std::vector<at::Tensor> linear_compression_backward(const at::Tensor& grad, const at::Tensor& w_cand,
                                                    const at::Tensor& e_cand, at::TensorList w_bcast,
                                                    at::TensorList e_bcast, at::TensorList index,
                                                    const c10::List<bool>& output_mask) {
  const CompressionTensors tensors{w_cand, e_cand, w_bcast, e_bcast, index};
  check_backward(grad, tensors, output_mask);
  std::vector<at::Tensor> results = differentiable_linear_compression_backward(grad, tensors, output_mask);
  for (size_t i = 0; i < results.size(); ++i) {
    if (output_mask[i]) results[i] = results[i].contiguous();
  }
  return results;
}

std::vector<at::Tensor> linear_compression_backward_meta(const at::Tensor& grad, const at::Tensor& w_cand,
                                                         const at::Tensor& e_cand, at::TensorList w_bcast,
                                                         at::TensorList e_bcast, at::TensorList index,
                                                         const c10::List<bool>& output_mask) {
  check_backward(grad, {w_cand, e_cand, w_bcast, e_bcast, index}, output_mask);
  std::vector<at::Tensor> inputs = {w_cand, e_cand};
  for (const auto& list : {w_bcast, e_bcast}) inputs.insert(inputs.end(), list.begin(), list.end());
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    results.push_back(output_mask[i] ? at::empty_symint(inputs[i].sym_sizes(), e_cand.options())
                                     : at::empty({0}, e_cand.options()));
  }
  return results;
}

}  // namespace

std::vector<at::Tensor> call_linear_compression_backward(const at::Tensor& grad, const CompressionTensors& tensors,
                                                         const c10::List<bool>& output_mask) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::TensorList,
                                            at::TensorList, at::TensorList, const c10::List<bool>&);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::linear_compression_backward", "").typed<Signature>();
  return op.call(grad, tensors.w_cand, tensors.e_cand, tensors.w_bcast, tensors.e_bcast, tensors.index, output_mask);
}

std::vector<at::Tensor> differentiable_linear_compression_backward(const at::Tensor& grad,
                                                                   const CompressionTensors& tensors,
                                                                   const c10::List<bool>& output_mask) {
  static const auto sum_by_user = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("ikbo::broadcast_backward", "")
                                      .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  const auto type = tensors.e_cand.scalar_type();
  const auto sums = sum_type(type);
  const size_t terms = tensors.w_bcast.size();
  std::vector<at::Tensor> results(2 + 2 * terms);
  const auto add = [&](size_t weight, size_t embedding, const at::Tensor& g, const at::Tensor& w, const at::Tensor& e) {
    if (output_mask[weight]) results[weight] = at::tensordot(g, e.to(sums), {0, 2}, {0, 2}).to(type);
    if (output_mask[embedding]) results[embedding] = at::matmul(w.to(sums).t(), g).to(type);
  };
  const at::Tensor g = grad.to(sums);
  add(0, 1, g, tensors.w_cand, tensors.e_cand);
  for (size_t t = 0; t < terms; ++t) {
    const size_t weight = 2 + t;
    const size_t embedding = 2 + terms + t;
    if (!output_mask[weight] && !output_mask[embedding]) continue;
    const c10::SymInt users = tensors.e_bcast[t].sym_size(0);
    at::Tensor e = tensors.e_bcast[t];
    if (output_mask[weight]) {
      // Users without candidates become zeros: whatever they hold, 0 · NaN included, stays out of the sum.
      const at::Tensor ones = at::ones_symint({g.sym_size(0), 1, 1}, g.options());
      e = at::where(sum_by_user.call(ones, tensors.index[t], users) > 0, e.to(sums), 0);
    }
    add(weight, embedding, sum_by_user.call(g, tensors.index[t], users), tensors.w_bcast[t], e);
  }
  for (at::Tensor& result : results) {
    if (!result.defined()) result = at::empty({0}, tensors.e_cand.options());
  }
  return results;
}

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("linear_compression_backward", linear_compression_backward);
}
TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear_compression_backward", linear_compression_backward);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("linear_compression_backward", linear_compression_backward_meta);
}
// Double backward goes through differentiable_linear_compression_backward; differentiating this operator itself is an
// error.
TORCH_LIBRARY_IMPL(ikbo, Autograd, m) {
  m.impl("linear_compression_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ikbo
