// Gradients of ikbo::target_attention, a user at a time over the queries of all its candidates: keys and values are
// never replicated. The softmax is made again from the log-sum-exp of the forward pass.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "ops/checks.h"
#include "ops/linear.h"
#include "ops/segment_sum.h"
#include "ops/target_attention.h"

namespace ikbo {
namespace {

constexpr const char* kBackward = "ikbo::target_attention_backward";

void check_like(std::string_view op, const at::Tensor& tensor, const std::string& name, const at::Tensor& q,
                c10::SymIntArrayRef sizes) {
  check_dense(op, tensor, name, q, "q");
  TORCH_CHECK_VALUE(tensor.dim() == static_cast<int64_t>(sizes.size()), op, ": ", name, " has shape ",
                    tensor.sym_sizes(), ", expected ", sizes);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    IKBO_CHECK_SIZE(tensor.sym_size(d).sym_eq(sizes[static_cast<size_t>(d)]), op, ": ", name, " has shape ",
                    tensor.sym_sizes(), ", expected ", sizes);
  }
}

}  // namespace

void check_attention_gradients(std::string_view op, std::string_view prefix, const at::Tensor& q,
                               const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp,
                               const at::Tensor& out, const at::Tensor& logsumexp) {
  const auto name = [&](const char* of) { return std::string(of).insert(0, prefix); };
  const auto sizes = q.sym_sizes();
  const auto rows = sizes.slice(0, sizes.size() - 1);
  check_like(op, grad_out, "grad_" + name("out"), q, sizes);
  check_like(op, out, name("out"), q, sizes);
  check_like(op, logsumexp, name("logsumexp"), q, rows);
  if (grad_logsumexp.has_value()) check_like(op, *grad_logsumexp, "grad_" + name("logsumexp"), q, rows);
}

void check_target_attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp,
                                     const AttentionArguments& arguments, const at::Tensor& out,
                                     const at::Tensor& logsumexp) {
  check_target_attention(kBackward, arguments);
  check_attention_gradients(kBackward, "", arguments.q, grad_out, grad_logsumexp, out, logsumexp);
}

namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> target_attention_backward_cpu(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> given_scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, given_scale};
  check_target_attention_backward(grad_out, grad_logsumexp, arguments, out, logsumexp);
  const HistoryRows history = history_rows(kBackward, arguments);
  const auto sums = sum_type(q.scalar_type());
  const auto wide = q.options().dtype(sums).memory_format(at::MemoryFormat::Contiguous);
  at::Tensor grad_q = at::zeros(q.sizes(), wide);
  at::Tensor grad_k = at::zeros(k.sizes(), wide);
  at::Tensor grad_v = at::zeros(v.sizes(), wide);
  if (grad_q.numel() > 0) {
    const double scale = attention_scale(arguments);
    const int64_t heads = k.size(-2);
    const int64_t group = q.size(2) / heads;
    const int64_t dim = q.size(3);
    const auto users = static_cast<int64_t>(history.first.size());
    CandidatesByUser groups = group_by_user(candidate_to_user.contiguous(), users);
    for (int64_t u = 0; u < users; ++u) {
      const auto i = static_cast<size_t>(u);
      const int64_t count = groups.begin[i + 1] - groups.begin[i];
      const int64_t length = history.length[i];
      if (count == 0 || length == 0) continue;
      const at::Tensor candidates =
          at::from_blob(groups.candidate.data() + groups.begin[i], {count}, at::TensorOptions(at::kLong));
      // (B, n_seed, H_q, ...) -> the user's rows by key head, (H_kv, rows, ...), and back.
      const auto rows_of = [&](const at::Tensor& all, int64_t columns) {
        return all.index_select(0, candidates)
            .to(sums)
            .reshape({count * q.size(1), heads, group, columns})
            .permute({1, 0, 2, 3})
            .reshape({heads, count * q.size(1) * group, columns});
      };
      const auto history_of = [&](const at::Tensor& all) {
        const at::Tensor rows = kv_offsets.has_value() ? all : all.select(0, u);
        return rows.narrow(0, kv_offsets.has_value() ? history.first[i] : 0, length).permute({1, 0, 2});
      };
      const at::Tensor queries = rows_of(q, dim);
      const at::Tensor keys = history_of(k).to(sums);
      const at::Tensor values = history_of(v).to(sums);
      const at::Tensor grad = rows_of(grad_out, dim);
      const at::Tensor weights =
          (at::bmm(queries, keys.transpose(1, 2)) * scale - rows_of(logsumexp, 1)).exp();  // (H_kv, rows, length)
      at::Tensor delta = (grad * rows_of(out, dim)).sum(2, /*keepdim=*/true);
      if (grad_logsumexp.has_value()) delta = delta - rows_of(*grad_logsumexp, 1);
      const at::Tensor grad_logits = weights * (at::bmm(grad, values.transpose(1, 2)) - delta) * scale;
      history_of(grad_v).add_(at::bmm(weights.transpose(1, 2), grad));
      history_of(grad_k).add_(at::bmm(grad_logits.transpose(1, 2), queries));
      const at::Tensor own = at::bmm(grad_logits, keys)
                                 .reshape({heads, count * q.size(1), group, dim})
                                 .permute({1, 0, 2, 3})
                                 .reshape({count, q.size(1), q.size(2), dim});
      grad_q.index_copy_(0, candidates, own);
    }
  }
  return {grad_q.to(q.scalar_type()), grad_k.to(k.scalar_type()), grad_v.to(v.scalar_type())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> target_attention_backward_meta(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  check_target_attention_backward(grad_out, grad_logsumexp, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale},
                                  out, logsumexp);
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_target_attention_backward(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const AttentionArguments& arguments,
    const at::Tensor& out, const at::Tensor& logsumexp) {
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
      const std::optional<at::Tensor>&, std::optional<double>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ikbo::target_attention_backward", "").typed<Signature>();
  return op.call(grad_out, grad_logsumexp, arguments.q, arguments.k, arguments.v, out, logsumexp,
                 arguments.candidate_to_user, arguments.kv_lengths, arguments.kv_offsets, arguments.scale);
}

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("target_attention_backward", target_attention_backward_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("target_attention_backward", target_attention_backward_meta);
}
// There is no second derivative: asking for one is an error.
TORCH_LIBRARY_IMPL(ikbo, Autograd, m) {
  m.impl("target_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ikbo
