// ikbo::target_attention and its gradients on CUDA.
#include "ops/target_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/target_attention_backward.h"
#include "ops/cuda/aligned_rows.h"
#include "ops/cuda/call.h"
#include "ops/linear.h"

namespace ikbo::cuda {
namespace {

constexpr const char* kAttention = "ikbo::target_attention";
constexpr const char* kAttentionLse = "ikbo::target_attention_lse";
constexpr const char* kBoth = "ikbo::self_and_target_attention";
constexpr const char* kBothLse = "ikbo::self_and_target_attention_lse";
constexpr const char* kBackward = "ikbo::target_attention_backward";
constexpr int64_t kMaxDim = 256;

// The arguments as the kernels want them, and the tensors that hold them.
struct Job {
  at::Tensor q, k, v, candidate_to_user, kv_lengths, kv_offsets;
  kernels::TargetAttentionProblem problem;
};

Job job_of(const char* op, const AttentionArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.q.size(3) <= kMaxDim, op, ": q has D=", arguments.q.size(3), ", on CUDA at most ",
                    kMaxDim);
  const auto dense_columns = [](const at::Tensor& tensor) {
    return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  };
  Job job{dense_columns(arguments.q),
          dense_columns(arguments.k),
          dense_columns(arguments.v),
          arguments.candidate_to_user.contiguous(),
          {},
          {},
          {}};
  const bool packed = arguments.kv_offsets.has_value();
  kernels::TargetAttentionProblem& p = job.problem;
  p.type = scalar_type_of(job.q.scalar_type());
  p.candidates = job.q.size(0);
  p.seeds = job.q.size(1);
  p.q_heads = job.q.size(2);
  p.kv_heads = job.k.size(-2);
  p.head_dim = job.q.size(3);
  p.users = packed ? arguments.kv_offsets->size(0) - 1 : job.k.size(0);
  p.length = job.k.size(packed ? 0 : 1);
  p.scale = attention_scale(arguments);
  p.q = job.q.const_data_ptr();
  p.q_candidate_stride = job.q.stride(0);
  p.q_seed_stride = job.q.stride(1);
  p.q_head_stride = job.q.stride(2);
  p.k = job.k.const_data_ptr();
  p.k_user_stride = packed ? 0 : job.k.stride(0);
  p.k_row_stride = job.k.stride(-3);
  p.k_head_stride = job.k.stride(-2);
  p.v = job.v.const_data_ptr();
  p.v_user_stride = packed ? 0 : job.v.stride(0);
  p.v_row_stride = job.v.stride(-3);
  p.v_head_stride = job.v.stride(-2);
  p.candidate_to_user = job.candidate_to_user.const_data_ptr<int32_t>();
  if (arguments.kv_lengths.has_value()) {
    job.kv_lengths = arguments.kv_lengths->contiguous();
    p.kv_lengths = job.kv_lengths.const_data_ptr<int32_t>();
  }
  if (packed) {
    job.kv_offsets = arguments.kv_offsets->contiguous();
    p.kv_offsets = job.kv_offsets.const_data_ptr<int32_t>();
  }
  return job;
}

std::tuple<at::Tensor, at::Tensor> attention_cuda(const char* op, const AttentionArguments& arguments,
                                                  bool with_logsumexp) {
  check_target_attention(op, arguments);
  const Call call(op, arguments.q);
  const at::Tensor& q = arguments.q;
  at::Tensor out = at::empty(q.sizes(), q.options().memory_format(at::MemoryFormat::Contiguous));
  at::Tensor logsumexp;
  if (with_logsumexp) {
    logsumexp = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(sum_type(q.scalar_type())));
  }
  if (out.numel() == 0) return {out, logsumexp};
  const bool by_matrix_unit = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  at::Tensor regular_q = q, regular_k = arguments.k, regular_v = arguments.v;
  const double scale = attention_scale(arguments);
  if (by_matrix_unit) {
    const std::vector<at::Tensor> regular =
        with_aligned_rows({scale < 0 ? q.neg() : q, arguments.k, arguments.v}, call.stream());
    regular_q = regular[0];
    regular_k = regular[1];
    regular_v = regular[2];
  }
  Job job = job_of(op, {regular_q, regular_k, regular_v, arguments.candidate_to_user, arguments.kv_lengths,
                        arguments.kv_offsets, by_matrix_unit ? std::abs(scale) : scale});
  job.problem.out = out.mutable_data_ptr();
  if (with_logsumexp) job.problem.logsumexp = logsumexp.mutable_data_ptr();
  if (kernels::target_attention_supported(job.problem)) {
    const auto bytes = static_cast<int64_t>(kernels::target_attention_workspace_bytes(job.problem));
    const at::Tensor workspace = at::empty({bytes}, q.options().dtype(at::kByte));
    kernels::target_attention(job.problem, workspace.mutable_data_ptr(), static_cast<size_t>(bytes), call.stream());
  } else {
    kernels::target_attention_generic(job.problem, call.stream());
  }
  return {out, logsumexp};
}

at::Tensor target_attention_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                 const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  return std::get<0>(attention_cuda(kAttention, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false));
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_cuda(const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v, const at::Tensor& candidate_to_user,
                                                             const std::optional<at::Tensor>& kv_lengths,
                                                             const std::optional<at::Tensor>& kv_offsets,
                                                             std::optional<double> scale) {
  return attention_cuda(kAttentionLse, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, true);
}

// In two calls.
AttentionResults both_cuda(const char* op, const at::Tensor& q_self, const AttentionArguments& arguments,
                           bool with_logsumexp) {
  check_self_and_target_attention(op, q_self, arguments);
  AttentionResults results;
  std::tie(results.target.out, results.target.logsumexp) = attention_cuda(op, arguments, with_logsumexp);
  const SelfRows rows(q_self, arguments);
  const at::Tensor queries = rows.as_queries(q_self, 0);
  const auto [out, logsumexp] = attention_cuda(op,
                                               {queries, arguments.k, arguments.v, rows.candidate_to_user(),
                                                arguments.kv_lengths, arguments.kv_offsets, arguments.scale},
                                               with_logsumexp);
  results.self.out = rows.as_rows(out, 0);
  if (with_logsumexp) {
    results.self.logsumexp = rows.as_rows(logsumexp, -std::numeric_limits<double>::infinity());
  }
  return results;
}

std::tuple<at::Tensor, at::Tensor> self_and_target_attention_cuda(const at::Tensor& q_self, const at::Tensor& q,
                                                                  const at::Tensor& k, const at::Tensor& v,
                                                                  const at::Tensor& candidate_to_user,
                                                                  const std::optional<at::Tensor>& kv_lengths,
                                                                  const std::optional<at::Tensor>& kv_offsets,
                                                                  std::optional<double> scale) {
  const AttentionResults results =
      both_cuda(kBoth, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false);
  return {results.self.out, results.target.out};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> self_and_target_attention_lse_cuda(
    const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const AttentionResults results =
      both_cuda(kBothLse, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, true);
  return {results.self.out, results.self.logsumexp, results.target.out, results.target.logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> target_attention_backward_cuda(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  check_target_attention_backward(grad_out, grad_logsumexp, arguments, out, logsumexp);
  const Call call(kBackward, q);
  const auto options = q.options().memory_format(at::MemoryFormat::Contiguous);
  at::Tensor grad_q = at::empty(q.sizes(), options);
  at::Tensor grad_k = at::zeros(k.sizes(), options);
  at::Tensor grad_v = at::zeros(v.sizes(), options);
  if (q.numel() == 0) return {grad_q, grad_k, grad_v};
  Job job = job_of(kBackward, arguments);
  const at::Tensor dense_out = out.contiguous();
  const at::Tensor dense_logsumexp = logsumexp.contiguous();
  const at::Tensor dense_grad = grad_out.contiguous();
  const at::Tensor dense_grad_logsumexp = grad_logsumexp.has_value() ? grad_logsumexp->contiguous() : at::Tensor();
  // The kernels read the results of the forward pass and write neither.
  job.problem.out = const_cast<void*>(dense_out.const_data_ptr());
  job.problem.logsumexp = const_cast<void*>(dense_logsumexp.const_data_ptr());
  const Groups groups = group_by_user(job.candidate_to_user, job.problem.users);
  kernels::target_attention_backward(
      {.forward = job.problem,
       .grad_out = dense_grad.const_data_ptr(),
       .grad_logsumexp = dense_grad_logsumexp.defined() ? dense_grad_logsumexp.const_data_ptr() : nullptr,
       .order = groups.order.const_data_ptr<int64_t>(),
       .begin = groups.begin.const_data_ptr<int64_t>(),
       .grad_q = grad_q.mutable_data_ptr(),
       .grad_k = grad_k.mutable_data_ptr(),
       .grad_v = grad_v.mutable_data_ptr()},
      call.stream());
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("target_attention", target_attention_cuda);
  m.impl("target_attention_lse", target_attention_lse_cuda);
  m.impl("self_and_target_attention", self_and_target_attention_cuda);
  m.impl("self_and_target_attention_lse", self_and_target_attention_lse_cuda);
  m.impl("target_attention_backward", target_attention_backward_cuda);
}

}  // namespace ikbo::cuda
