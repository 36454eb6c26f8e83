// Gradients: what autograd does around each operator. The arithmetic is in the operators' own backward operators.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ops/linear.h"
#include "ops/linear_compression.h"
#include "ops/target_attention.h"

namespace ikbo {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor call_broadcast(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ikbo::broadcast", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x_user, candidate_to_user);
}

at::Tensor call_broadcast_backward(const at::Tensor& grad, const at::Tensor& candidate_to_user, c10::SymInt num_users) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ikbo::broadcast_backward", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  return op.call(grad, candidate_to_user, std::move(num_users));
}

// Lookup and sum are each other's transpose, so derivatives of any order are right.
struct Broadcast : torch::autograd::Function<Broadcast> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({candidate_to_user});
    ctx->saved_data["num_users"] = x_user.dim() > 0 ? x_user.sym_size(0) : c10::SymInt(0);
    return call_broadcast(x_user, candidate_to_user);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_broadcast_backward(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["num_users"].toSymInt()),
            at::Tensor()};
  }
};

struct BroadcastBackward : torch::autograd::Function<BroadcastBackward> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& grad, const at::Tensor& candidate_to_user,
                            c10::SymInt num_users) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({candidate_to_user});
    return call_broadcast_backward(grad, candidate_to_user, std::move(num_users));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_broadcast(grads[0], ctx->get_saved_variables()[0]), at::Tensor(), at::Tensor()};
  }
};

at::Tensor broadcast_autograd(const at::Tensor& x_user, const at::Tensor& candidate_to_user) {
  return Broadcast::apply(x_user, candidate_to_user);
}

at::Tensor broadcast_backward_autograd(const at::Tensor& grad, const at::Tensor& candidate_to_user,
                                       c10::SymInt num_users) {
  return BroadcastBackward::apply(grad, candidate_to_user, std::move(num_users));
}

// List arguments must be at::TensorList: of a std::vector<at::Tensor> autograd would see no inputs at all and the
// gradients of its elements would be lost without a word.
struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_cand, const at::Tensor& w_cand,
                            at::TensorList x_bcast, at::TensorList w_bcast, at::TensorList index,
                            const std::optional<at::Tensor>& bias, std::string_view activation) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("ikbo::linear", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&, at::TensorList, at::TensorList,
                                                 at::TensorList, const std::optional<at::Tensor>&, std::string_view)>();
    at::Tensor out = op.call(x_cand, w_cand, x_bcast, w_bcast, index, bias, activation);
    variable_list saved = {x_cand, w_cand, bias.value_or(at::Tensor()),
                           derivative_from_output(parse_activation("ikbo::linear", activation)) ? out : at::Tensor()};
    for (const auto& list : {x_bcast, w_bcast, index}) saved.insert(saved.end(), list.begin(), list.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["activation"] = std::string(activation);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const size_t terms = (saved.size() - 4) / 3;
    const auto list = [&](size_t i) { return at::TensorList(saved.data() + 4 + i * terms, terms); };
    const std::optional<at::Tensor> bias = saved[2].defined() ? std::make_optional(saved[2]) : std::nullopt;
    const std::optional<at::Tensor> output = saved[3].defined() ? std::make_optional(saved[3]) : std::nullopt;
    const LinearTensors tensors{saved[0], saved[1], list(0), list(1), list(2), bias};
    const std::string activation = ctx->saved_data["activation"].toStringRef();

    // Edges are the tensor inputs in the order of `forward`; the operator's results begin x_cand, w_cand, bias.
    std::vector<size_t> edge = {0, 1, 2 + 3 * terms};
    for (size_t i = 0; i < 2 * terms; ++i) edge.push_back(2 + i);
    c10::List<bool> mask;
    for (size_t i = 0; i < edge.size(); ++i) {
      mask.push_back((i != 2 || bias.has_value()) && ctx->needs_input_grad(edge[i]));
    }
    const std::vector<at::Tensor> results =
        at::GradMode::is_enabled()
            ? differentiable_linear_backward(grads[0], tensors, parse_activation("ikbo::linear", activation), mask)
            : call_linear_backward(grads[0], output, tensors, activation, mask);
    variable_list out(2 + 3 * terms + 2);  // and the bias, and the activation, which has no gradient
    for (size_t i = 0; i < edge.size(); ++i) {
      if (mask[i]) out[edge[i]] = results[i];
    }
    return out;
  }
};

at::Tensor linear_autograd(const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                           at::TensorList w_bcast, at::TensorList index, const std::optional<at::Tensor>& bias,
                           std::string_view activation) {
  return Linear::apply(x_cand, w_cand, x_bcast, w_bcast, index, bias, activation);
}

struct Concatenation : torch::autograd::Function<Concatenation> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList tensors, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("ikbo::aligned_cat", "")
                               .typed<at::Tensor(at::TensorList, int64_t)>();
    at::Tensor out = op.call(tensors, dim);
    std::vector<c10::SymInt> extents;
    for (const at::Tensor& tensor : tensors) extents.push_back(tensor.sym_size(dim));
    ctx->saved_data["extents"] = extents;
    ctx->saved_data["dim"] = dim;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const std::vector<c10::SymInt> extents = ctx->saved_data["extents"].toSymIntVector();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    variable_list out(extents.size() + 1);  // and the dimension, which has no gradient
    c10::SymInt from = 0;
    for (size_t i = 0; i < extents.size(); ++i) {
      if (ctx->needs_input_grad(i)) out[i] = grads[0].narrow_symint(dim, from, extents[i]);
      from = from + extents[i];
    }
    return out;
  }
};

at::Tensor aligned_cat_autograd(at::TensorList tensors, int64_t dim) {
  return Concatenation::apply(tensors, dim);
}

using CompressionSignature = at::Tensor(const at::Tensor&, const at::Tensor&, at::TensorList, at::TensorList,
                                        at::TensorList, std::optional<at::ScalarType>);

struct LinearCompression : torch::autograd::Function<LinearCompression> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& w_cand, const at::Tensor& e_cand,
                            at::TensorList w_bcast, at::TensorList e_bcast, at::TensorList index,
                            std::optional<at::ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::linear_compression", "").typed<CompressionSignature>();
    variable_list saved = {w_cand, e_cand};
    for (const auto& list : {w_bcast, e_bcast, index}) saved.insert(saved.end(), list.begin(), list.end());
    ctx->save_for_backward(std::move(saved));
    return op.call(w_cand, e_cand, w_bcast, e_bcast, index, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const size_t terms = (saved.size() - 2) / 3;
    const auto list = [&](size_t i) { return at::TensorList(saved.data() + 2 + i * terms, terms); };
    const CompressionTensors tensors{saved[0], saved[1], list(0), list(1), list(2)};
    // Edges are the tensor inputs in the order of `forward`; the results stand in the same order.
    c10::List<bool> mask;
    for (size_t i = 0; i < 2 + 2 * terms; ++i) mask.push_back(ctx->needs_input_grad(i));
    const std::vector<at::Tensor> results = at::GradMode::is_enabled()
                                                ? differentiable_linear_compression_backward(grads[0], tensors, mask)
                                                : call_linear_compression_backward(grads[0], tensors, mask);
    variable_list out(2 + 3 * terms + 1);  // and the output's type, which has no gradient
    for (size_t i = 0; i < results.size(); ++i) {
      if (mask[i]) out[i] = results[i];
    }
    return out;
  }
};

at::Tensor linear_compression_autograd(const at::Tensor& w_cand, const at::Tensor& e_cand, at::TensorList w_bcast,
                                       at::TensorList e_bcast, at::TensorList index,
                                       std::optional<at::ScalarType> out_dtype) {
  return LinearCompression::apply(w_cand, e_cand, w_bcast, e_bcast, index, out_dtype);
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

struct TargetAttention : torch::autograd::Function<TargetAttention> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                               const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                         const at::Tensor&, const std::optional<at::Tensor>&,
                                                         const std::optional<at::Tensor>&, std::optional<double>);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::target_attention_lse", "").typed<Signature>();
    auto [out, logsumexp] = op.call(q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, candidate_to_user, kv_lengths.value_or(at::Tensor()),
                            kv_offsets.value_or(at::Tensor()), out, logsumexp});
    ctx->saved_data["scale"] = scale;
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto lengths = optional(saved[4]);
    const auto offsets = optional(saved[5]);
    const AttentionArguments arguments{
        saved[0], saved[1], saved[2], saved[3], lengths, offsets, ctx->saved_data["scale"].toOptional<double>()};
    variable_list out(7);
    if (!grads[0].defined() && !grads[1].defined()) return out;
    const at::Tensor grad = grads[0].defined() ? grads[0] : at::zeros_like(saved[6]);
    std::tie(out[0], out[1], out[2]) =
        call_target_attention_backward(grad, optional(grads[1]), arguments, saved[6], saved[7]);
    return out;
  }
};

at::Tensor target_attention_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                     const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  if (!at::GradMode::is_enabled() || !(q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    // Nobody needs the log-sum-exp.
    at::AutoDispatchBelowADInplaceOrView below;
    using Signature =
        at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, std::optional<double>);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::target_attention", "").typed<Signature>();
    return op.call(q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
  }
  return TargetAttention::apply(q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale)[0];
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_autograd(const at::Tensor& q, const at::Tensor& k,
                                                                 const at::Tensor& v,
                                                                 const at::Tensor& candidate_to_user,
                                                                 const std::optional<at::Tensor>& kv_lengths,
                                                                 const std::optional<at::Tensor>& kv_offsets,
                                                                 std::optional<double> scale) {
  const variable_list results = TargetAttention::apply(q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
  return {results[0], results[1]};
}

struct SelfAndTargetAttention : torch::autograd::Function<SelfAndTargetAttention> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& candidate_to_user,
                               const std::optional<at::Tensor>& kv_lengths, const std::optional<at::Tensor>& kv_offsets,
                               std::optional<double> scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, std::optional<double>);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::self_and_target_attention_lse", "").typed<Signature>();
    auto [self_out, self_logsumexp, out, logsumexp] =
        op.call(q_self, q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q_self, q, k, v, candidate_to_user, kv_lengths.value_or(at::Tensor()),
                            kv_offsets.value_or(at::Tensor()), self_out, self_logsumexp, out, logsumexp});
    ctx->saved_data["scale"] = scale;
    return {self_out, self_logsumexp, out, logsumexp};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto lengths = optional(saved[5]);
    const auto offsets = optional(saved[6]);
    const AttentionArguments arguments{
        saved[1], saved[2], saved[3], saved[4], lengths, offsets, ctx->saved_data["scale"].toOptional<double>()};
    variable_list out(8);
    if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); })) return out;
    const at::Tensor grad_self = grads[0].defined() ? grads[0] : at::zeros_like(saved[7]);
    const at::Tensor grad_target = grads[2].defined() ? grads[2] : at::zeros_like(saved[9]);
    const auto grad_self_sums = optional(grads[1]);
    const auto grad_target_sums = optional(grads[3]);
    std::tie(out[0], out[1], out[2], out[3]) =
        call_self_and_target_attention_backward(saved[0], arguments, {grad_self, grad_self_sums, saved[7], saved[8]},
                                                {grad_target, grad_target_sums, saved[9], saved[10]});
    return out;
  }
};

std::tuple<at::Tensor, at::Tensor> self_and_target_attention_autograd(const at::Tensor& q_self, const at::Tensor& q,
                                                                      const at::Tensor& k, const at::Tensor& v,
                                                                      const at::Tensor& candidate_to_user,
                                                                      const std::optional<at::Tensor>& kv_lengths,
                                                                      const std::optional<at::Tensor>& kv_offsets,
                                                                      std::optional<double> scale) {
  if (!at::GradMode::is_enabled() ||
      !(q_self.requires_grad() || q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    at::AutoDispatchBelowADInplaceOrView below;
    using Signature = std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, std::optional<double>);
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::self_and_target_attention", "").typed<Signature>();
    return op.call(q_self, q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
  }
  const variable_list results =
      SelfAndTargetAttention::apply(q_self, q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
  return {results[0], results[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> self_and_target_attention_lse_autograd(
    const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const variable_list results =
      SelfAndTargetAttention::apply(q_self, q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale);
  return {results[0], results[1], results[2], results[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, Autograd, m) {
  m.impl("aligned_cat", aligned_cat_autograd);
  m.impl("broadcast", broadcast_autograd);
  m.impl("broadcast_backward", broadcast_backward_autograd);
  m.impl("linear", linear_autograd);
  m.impl("linear_compression", linear_compression_autograd);
  m.impl("target_attention", target_attention_autograd);
  m.impl("target_attention_lse", target_attention_lse_autograd);
  m.impl("self_and_target_attention", self_and_target_attention_autograd);
  m.impl("self_and_target_attention_lse", self_and_target_attention_lse_autograd);
}

}  // namespace ikbo
