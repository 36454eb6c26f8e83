// Gradients of ikbo::self_and_target_attention: those of target attention for each of its two results, and the sums of
// what both give to keys and values.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <limits>

#include "ops/target_attention.h"

namespace ikbo {
namespace {

constexpr const char* kBackward = "ikbo::self_and_target_attention_backward";

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Signature = Gradients(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, std::optional<double>);

void check(const at::Tensor& q_self, const AttentionArguments& arguments, const AttentionGradients& self,
           const AttentionGradients& target) {
  check_self_and_target_attention(kBackward, q_self, arguments);
  check_attention_gradients(kBackward, "self_", q_self, self.grad_out, self.grad_logsumexp, self.out, self.logsumexp);
  check_attention_gradients(kBackward, "target_", arguments.q, target.grad_out, target.grad_logsumexp, target.out,
                            target.logsumexp);
}

// On any device.
Gradients backward(const at::Tensor& grad_self_out, const std::optional<at::Tensor>& grad_self_logsumexp,
                   const at::Tensor& grad_target_out, const std::optional<at::Tensor>& grad_target_logsumexp,
                   const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& self_out, const at::Tensor& self_logsumexp, const at::Tensor& target_out,
                   const at::Tensor& target_logsumexp, const at::Tensor& candidate_to_user,
                   const std::optional<at::Tensor>& kv_lengths, const std::optional<at::Tensor>& kv_offsets,
                   std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  check(q_self, arguments, {grad_self_out, grad_self_logsumexp, self_out, self_logsumexp},
        {grad_target_out, grad_target_logsumexp, target_out, target_logsumexp});
  auto [grad_q, grad_k, grad_v] =
      call_target_attention_backward(grad_target_out, grad_target_logsumexp, arguments, target_out, target_logsumexp);
  if (kv_offsets.has_value() && kv_offsets->size(0) == 1) {
    // No user, so these are rows of no history.
    const auto options = q_self.options().memory_format(at::MemoryFormat::Contiguous);
    return {at::zeros(q_self.sizes(), options), grad_q, grad_k, grad_v};
  }
  const SelfRows rows(q_self, arguments);
  const at::Tensor queries = rows.as_queries(q_self, 0);
  std::optional<at::Tensor> grad_logsumexp;
  if (grad_self_logsumexp.has_value()) grad_logsumexp = rows.as_queries(*grad_self_logsumexp, 0);
  // Where the sum is infinite all weights are 0.
  const auto [grad_queries, more_k, more_v] = call_target_attention_backward(
      rows.as_queries(grad_self_out, 0), grad_logsumexp,
      {queries, k, v, rows.candidate_to_user(), kv_lengths, kv_offsets, scale}, rows.as_queries(self_out, 0),
      rows.as_queries(self_logsumexp, std::numeric_limits<double>::infinity()));
  return {rows.as_rows(grad_queries, 0), grad_q, grad_k.add_(more_k), grad_v.add_(more_v)};
}

Gradients backward_meta(const at::Tensor& grad_self_out, const std::optional<at::Tensor>& grad_self_logsumexp,
                        const at::Tensor& grad_target_out, const std::optional<at::Tensor>& grad_target_logsumexp,
                        const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& self_out, const at::Tensor& self_logsumexp, const at::Tensor& target_out,
                        const at::Tensor& target_logsumexp, const at::Tensor& candidate_to_user,
                        const std::optional<at::Tensor>& kv_lengths, const std::optional<at::Tensor>& kv_offsets,
                        std::optional<double> scale) {
  check(q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale},
        {grad_self_out, grad_self_logsumexp, self_out, self_logsumexp},
        {grad_target_out, grad_target_logsumexp, target_out, target_logsumexp});
  const auto empty_like = [](const at::Tensor& tensor) {
    return at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  return {empty_like(q_self), empty_like(q), empty_like(k), empty_like(v)};
}

}  // namespace

Gradients call_self_and_target_attention_backward(const at::Tensor& q_self, const AttentionArguments& arguments,
                                                  const AttentionGradients& self, const AttentionGradients& target) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::self_and_target_attention_backward", "").typed<Signature>();
  return op.call(self.grad_out, self.grad_logsumexp, target.grad_out, target.grad_logsumexp, q_self, arguments.q,
                 arguments.k, arguments.v, self.out, self.logsumexp, target.out, target.logsumexp,
                 arguments.candidate_to_user, arguments.kv_lengths, arguments.kv_offsets, arguments.scale);
}

TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("self_and_target_attention_backward", backward);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("self_and_target_attention_backward", backward_meta);
}
// There is no second derivative: asking for one is an error.
TORCH_LIBRARY_IMPL(ikbo, Autograd, m) {
  m.impl("self_and_target_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ikbo
