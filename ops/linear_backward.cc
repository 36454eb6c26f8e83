// Gradients of ikbo::linear. No replicated tensor here either: a user's gradient is the sum over its candidates,
// taken before anything is multiplied by a weight.
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/linear.h"
#include "ops/segment_sum.h"

namespace ikbo {
namespace {

constexpr const char* kBackward = "ikbo::linear_backward";
// Results before those of the broadcast terms: x_cand, w_cand, bias.
constexpr size_t kFixedResults = 3;

void check_backward(const at::Tensor& grad, const std::optional<at::Tensor>& output, const LinearTensors& tensors,
                    cpu::Activation activation, const c10::List<bool>& output_mask) {
  check_linear(kBackward, tensors);
  const auto check_result = [&](const at::Tensor& tensor, const char* name) {
    check_dense(kBackward, tensor, name, tensors.x_cand, "x_cand");
    check_same_dtype(kBackward, tensor, name, tensors.x_cand, "x_cand");
    check_dim(kBackward, tensor, name, 2, "(B_cand, N)");
    IKBO_CHECK_SIZE(tensor.sym_size(0).sym_eq(tensors.x_cand.sym_size(0)), kBackward, ": ", name, " has ",
                    tensor.sym_size(0), " rows, expected ", tensors.x_cand.sym_size(0), ", the rows of x_cand");
    IKBO_CHECK_SIZE(tensor.sym_size(1).sym_eq(tensors.w_cand.sym_size(0)), kBackward, ": ", name, " has ",
                    tensor.sym_size(1), " columns, expected ", tensors.w_cand.sym_size(0), ", the rows of w_cand");
  };
  check_result(grad, "grad");
  if (output.has_value()) check_result(*output, "output");
  TORCH_CHECK_VALUE(output.has_value() || !derivative_from_output(activation), kBackward,
                    ": output is missing, expected the result of the forward pass for activations relu, sigmoid and "
                    "tanh");
  const size_t expected = kFixedResults + 2 * tensors.x_bcast.size();
  TORCH_CHECK_VALUE(output_mask.size() == expected, kBackward, ": output_mask has ", output_mask.size(),
                    " values, expected ", expected, " (x_cand, w_cand, bias, x_bcast..., w_bcast...)");
  TORCH_CHECK_VALUE(!output_mask[2] || tensors.bias.has_value(), kBackward,
                    ": output_mask asks for the gradient of bias, but there is none");
}

// The gradient before the activation, (B, N) in the type sums are kept in.
at::Tensor before_activation(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                             const LinearTensors& tensors, cpu::Activation activation) {
  const auto type = sum_type(grad.scalar_type());
  const at::Tensor g = grad.to(type);
  const auto z = [&] { return compute_linear_cpu(kBackward, tensors, cpu::Activation::kNone, /*keep_sum_type=*/true); };
  switch (activation) {
    case cpu::Activation::kNone:
      return g;
    case cpu::Activation::kRelu:
      return at::threshold_backward(g, output->to(type), 0);
    case cpu::Activation::kSigmoid:
      return at::sigmoid_backward(g, output->to(type));
    case cpu::Activation::kTanh:
      return at::tanh_backward(g, output->to(type));
    case cpu::Activation::kSilu:
      return at::silu_backward(g, z());
    case cpu::Activation::kGelu:
      return at::gelu_backward(g, z(), "none");
  }
  return g;
}

// Users with candidates, or an undefined tensor if that is all of them.
at::Tensor users_with_candidates(const CandidatesByUser& groups) {
  const int64_t users = static_cast<int64_t>(groups.begin.size()) - 1;
  std::vector<int64_t> used;
  for (size_t u = 0; u < static_cast<size_t>(users); ++u) {
    if (groups.begin[u + 1] > groups.begin[u]) used.push_back(static_cast<int64_t>(u));
  }
  return static_cast<int64_t>(used.size()) == users ? at::Tensor() : at::tensor(used);
}

std::vector<at::Tensor> linear_backward_cpu(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                                            const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                                            at::TensorList w_bcast, at::TensorList index,
                                            const std::optional<at::Tensor>& bias, std::string_view activation,
                                            const c10::List<bool>& output_mask) {
  const LinearTensors tensors{x_cand, w_cand, x_bcast, w_bcast, index, bias};
  const cpu::Activation parsed = parse_activation(kBackward, activation);
  check_backward(grad, output, tensors, parsed, output_mask);
  const auto type = x_cand.scalar_type();
  const auto sums = sum_type(type);
  const size_t terms = x_bcast.size();
  std::vector<at::Tensor> results(kFixedResults + 2 * terms);
  for (auto& result : results) result = at::empty({0}, x_cand.options());

  const at::Tensor g = before_activation(grad, output, tensors, parsed).contiguous();  // (B, N)
  if (output_mask[0]) results[0] = at::mm(g, w_cand.to(sums)).to(type);
  if (output_mask[1]) results[1] = at::mm(g.t(), x_cand.to(sums)).to(type);
  if (output_mask[2]) results[2] = g.sum(0).to(type);
  for (size_t t = 0; t < terms; ++t) {
    at::Tensor& grad_x = results[kFixedResults + t];
    at::Tensor& grad_w = results[kFixedResults + terms + t];
    if (!output_mask[kFixedResults + t] && !output_mask[kFixedResults + terms + t]) continue;
    const at::Tensor candidate_to_user = index[t].contiguous();
    const int64_t users = x_bcast[t].size(0);
    check_index_values(kBackward, candidate_to_user, element_name("index", t), users, element_name("x_bcast", t));
    const CandidatesByUser groups = group_by_user(candidate_to_user, users);
    at::Tensor g_user = segment_sum(g, groups);  // (B_t, N)
    // A row nobody looked up takes no part, whatever it holds: 0 · NaN would otherwise reach the weights' gradient.
    const at::Tensor used = users_with_candidates(groups);
    const auto rows = [&](const at::Tensor& all) { return used.defined() ? all.index_select(0, used) : all; };
    g_user = rows(g_user);
    if (output_mask[kFixedResults + t]) {
      const at::Tensor values = at::mm(g_user, w_bcast[t].to(sums)).to(type);
      grad_x = used.defined() ? at::zeros(x_bcast[t].sizes(), values.options()).index_copy_(0, used, values) : values;
    }
    if (output_mask[kFixedResults + terms + t]) {
      grad_w = at::mm(g_user.t(), rows(x_bcast[t]).to(sums)).to(type);
    }
  }
  return results;
}

std::vector<at::Tensor> linear_backward_meta(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                                             const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                                             at::TensorList w_bcast, at::TensorList index,
                                             const std::optional<at::Tensor>& bias, std::string_view activation,
                                             const c10::List<bool>& output_mask) {
  check_backward(grad, output, {x_cand, w_cand, x_bcast, w_bcast, index, bias}, parse_activation(kBackward, activation),
                 output_mask);
  std::vector<at::Tensor> inputs = {x_cand, w_cand, bias.value_or(at::Tensor())};
  for (const auto& list : {x_bcast, w_bcast}) inputs.insert(inputs.end(), list.begin(), list.end());
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    results.push_back(output_mask[i] ? at::empty_symint(inputs[i].sym_sizes(), x_cand.options())
                                     : at::empty({0}, x_cand.options()));
  }
  return results;
}

}  // namespace

std::vector<at::Tensor> call_linear_backward(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                                             const LinearTensors& tensors, std::string_view activation,
                                             const c10::List<bool>& output_mask) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                                            const at::Tensor&, at::TensorList, at::TensorList, at::TensorList,
                                            const std::optional<at::Tensor>&, std::string_view, const c10::List<bool>&);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::linear_backward", "").typed<Signature>();
  return op.call(grad, output, tensors.x_cand, tensors.w_cand, tensors.x_bcast, tensors.w_bcast, tensors.index,
                 tensors.bias, activation, output_mask);
}

std::vector<at::Tensor> differentiable_linear_backward(const at::Tensor& grad, const LinearTensors& tensors,
                                                       cpu::Activation activation, const c10::List<bool>& output_mask) {
  static const auto broadcast = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("ikbo::broadcast", "")
                                    .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  static const auto broadcast_backward = c10::Dispatcher::singleton()
                                             .findSchemaOrThrow("ikbo::broadcast_backward", "")
                                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  const auto type = grad.scalar_type();
  const auto sums = sum_type(type);
  const size_t terms = tensors.x_bcast.size();
  const at::Tensor x_cand = tensors.x_cand.to(sums);
  const at::Tensor w_cand = tensors.w_cand.to(sums);
  std::vector<at::Tensor> x, w;
  const at::Tensor ones = at::ones_symint({x_cand.sym_size(0), 1}, x_cand.options());
  for (size_t t = 0; t < terms; ++t) {
    // Rows nobody looks up become zeros, so that whatever they hold stays out of the products.
    const auto rows = tensors.x_bcast[t].sym_size(0);
    const at::Tensor used = broadcast_backward.call(ones, tensors.index[t], rows) > 0;
    x.push_back(at::where(used, tensors.x_bcast[t].to(sums), 0));
    w.push_back(tensors.w_bcast[t].to(sums));
  }

  at::Tensor g = grad.to(sums);
  if (activation != cpu::Activation::kNone) {
    at::Tensor z = at::mm(x_cand, w_cand.t());
    for (size_t t = 0; t < terms; ++t) z = z + broadcast.call(at::mm(x[t], w[t].t()), tensors.index[t]);
    if (tensors.bias.has_value()) z = z + tensors.bias->to(sums);
    if (activation == cpu::Activation::kRelu) {
      g = at::threshold_backward(g, z, 0);
    } else if (activation == cpu::Activation::kTanh) {
      const at::Tensor y = z.tanh();
      g = g * (1 - y * y);
    } else if (activation == cpu::Activation::kGelu) {
      const at::Tensor below = (z * std::sqrt(0.5)).erf() * 0.5 + 0.5;  // the normal distribution's mass below z
      g = g * (below + z * (z * z * -0.5).exp() * (1 / std::sqrt(2 * M_PI)));
    } else {
      const at::Tensor y = z.sigmoid();
      const at::Tensor slope = y * (1 - y);
      g = g * (activation == cpu::Activation::kSigmoid ? slope : y + z * slope);
    }
  }

  std::vector<at::Tensor> results(kFixedResults + 2 * terms);
  if (output_mask[0]) results[0] = at::mm(g, w_cand).to(type);
  if (output_mask[1]) results[1] = at::mm(g.t(), x_cand).to(type);
  if (output_mask[2]) results[2] = g.sum(0).to(type);
  for (size_t t = 0; t < terms; ++t) {
    const size_t grad_x = kFixedResults + t;
    const size_t grad_w = kFixedResults + terms + t;
    if (!output_mask[grad_x] && !output_mask[grad_w]) continue;
    const at::Tensor g_user = broadcast_backward.call(g, tensors.index[t], x[t].sym_size(0));
    if (output_mask[grad_x]) results[grad_x] = at::mm(g_user, w[t]).to(type);
    if (output_mask[grad_w]) results[grad_w] = at::mm(g_user.t(), x[t]).to(type);
  }
  return results;
}

namespace {

std::vector<at::Tensor> linear_backward_cuda(const at::Tensor& grad, const std::optional<at::Tensor>& output,
                                             const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                                             at::TensorList w_bcast, at::TensorList index,
                                             const std::optional<at::Tensor>& bias, std::string_view activation,
                                             const c10::List<bool>& output_mask) {
  const LinearTensors tensors{x_cand, w_cand, x_bcast, w_bcast, index, bias};
  const cpu::Activation parsed = parse_activation(kBackward, activation);
  check_backward(grad, output, tensors, parsed, output_mask);
  std::vector<at::Tensor> results = differentiable_linear_backward(grad, tensors, parsed, output_mask);
  for (auto& result : results) {
    result = result.defined() ? result.contiguous() : at::empty({0}, x_cand.options());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("linear_backward", linear_backward_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear_backward", linear_backward_cuda);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("linear_backward", linear_backward_meta);
}
// Double backward goes through differentiable_linear_backward; differentiating this operator itself is an error.
TORCH_LIBRARY_IMPL(ikbo, Autograd, m) {
  m.impl("linear_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ikbo
