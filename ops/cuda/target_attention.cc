// ikbo::target_attention, its gradients and ikbo::self_and_target_attention on CUDA.
#include "ops/target_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <utility>
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
  at::Tensor q, k, v, candidate_to_user, kv_lengths, kv_offsets, q_self;
  kernels::TargetAttentionProblem problem;
};

at::Tensor dense_columns(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

Job job_of(const char* op, const AttentionArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.q.size(3) <= kMaxDim, op, ": q has D=", arguments.q.size(3), ", on CUDA at most ",
                    kMaxDim);
  Job job{dense_columns(arguments.q),
          dense_columns(arguments.k),
          dense_columns(arguments.v),
          arguments.candidate_to_user.contiguous(),
          {},
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

void add_self(Job& job, const at::Tensor& q_self) {
  job.q_self = dense_columns(q_self);
  kernels::TargetAttentionProblem& p = job.problem;
  p.self_q = job.q_self.const_data_ptr();
  p.self_q_user_stride = p.kv_offsets != nullptr ? 0 : job.q_self.stride(0);
  p.self_q_row_stride = job.q_self.stride(-3);
  p.self_q_head_stride = job.q_self.stride(-2);
}

AttentionResult empty_result(const at::Tensor& q, bool with_logsumexp) {
  const auto sizes = q.sizes();
  AttentionResult result{at::empty(sizes, q.options().memory_format(at::MemoryFormat::Contiguous)), {}};
  if (with_logsumexp) {
    result.logsumexp = at::empty(sizes.slice(0, sizes.size() - 1), q.options().dtype(sum_type(q.scalar_type())));
  }
  return result;
}

AttentionResults attention_cuda(const char* op, const std::optional<at::Tensor>& q_self,
                                const AttentionArguments& arguments, bool with_logsumexp);

// The rows of q_self in a call of their own.
AttentionResult self_attention(const char* op, const at::Tensor& q_self, const AttentionArguments& arguments,
                               bool with_logsumexp) {
  const SelfRows rows(q_self, arguments);
  const at::Tensor queries = rows.as_queries(q_self, 0);
  AttentionResult result = attention_cuda(op, {},
                                          {queries, arguments.k, arguments.v, rows.candidate_to_user(),
                                           arguments.kv_lengths, arguments.kv_offsets, arguments.scale},
                                          with_logsumexp)
                               .target;
  result.out = rows.as_rows(result.out, 0);
  if (with_logsumexp) result.logsumexp = rows.as_rows(result.logsumexp, -std::numeric_limits<double>::infinity());
  return result;
}

// In one launch where the kernels over a list of tiles serve it, else in two.
AttentionResults attention_cuda(const char* op, const std::optional<at::Tensor>& q_self,
                                const AttentionArguments& arguments, bool with_logsumexp) {
  if (q_self.has_value()) {
    check_self_and_target_attention(op, *q_self, arguments);
  } else {
    check_target_attention(op, arguments);
  }
  const Call call(op, arguments.q);
  AttentionResults results;
  results.target = empty_result(arguments.q, with_logsumexp);
  const bool has_self = q_self.has_value() && q_self->numel() > 0;
  if (q_self.has_value()) results.self = empty_result(*q_self, with_logsumexp);
  if (results.target.out.numel() == 0 && !has_self) return results;
  const bool by_matrix_unit = arguments.q.scalar_type() == at::kBFloat16 || arguments.q.scalar_type() == at::kHalf;
  std::vector<at::Tensor> regular = {arguments.q, arguments.k, arguments.v};
  if (has_self) regular.push_back(*q_self);
  double scale = attention_scale(arguments);
  if (by_matrix_unit) {
    if (scale < 0) {
      for (size_t i = 0; i < regular.size(); i += 3) regular[i] = regular[i].neg();  // the queries
      scale = -scale;
    }
    // The kernel takes queries from anywhere; above this D, only where it has boxes of them.
    constexpr int64_t kMostMovedDim = 128;
    const bool moves_queries = arguments.q.size(3) <= kMostMovedDim ||
                               (!has_self && kernels::unaligned_queries_have_boxes(
                                                 arguments.q.size(1), arguments.q.size(2), arguments.k.size(-2)));
    std::vector<size_t> aligned = {1, 2};
    if (!moves_queries) aligned.push_back(0);
    if (!moves_queries && has_self) aligned.push_back(3);
    std::vector<at::Tensor> rows;
    for (const size_t i : aligned) rows.push_back(regular[i]);
    rows = with_aligned_rows(rows, call.stream());
    for (size_t i = 0; i < rows.size(); ++i) regular[aligned[i]] = std::move(rows[i]);
  }
  Job job = job_of(op, {regular[0], regular[1], regular[2], arguments.candidate_to_user, arguments.kv_lengths,
                        arguments.kv_offsets, scale});
  const auto place = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
  job.problem.out = place(results.target.out);
  job.problem.logsumexp = place(results.target.logsumexp);
  if (has_self) {
    add_self(job, regular[3]);
    job.problem.self_out = place(results.self.out);
    job.problem.self_logsumexp = place(results.self.logsumexp);
  }
  if (kernels::target_attention_supported(job.problem)) {
    const auto bytes = static_cast<int64_t>(kernels::target_attention_workspace_bytes(job.problem));
    const at::Tensor workspace = at::empty({bytes}, arguments.q.options().dtype(at::kByte));
    kernels::target_attention(job.problem, workspace.mutable_data_ptr(), static_cast<size_t>(bytes), call.stream());
  } else if (has_self) {
    results.target = attention_cuda(op, {}, arguments, with_logsumexp).target;
    results.self = self_attention(op, *q_self, arguments, with_logsumexp);
  } else {
    kernels::target_attention_generic(job.problem, call.stream());
  }
  return results;
}

at::Tensor target_attention_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                 const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  return attention_cuda(kAttention, {}, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false).target.out;
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_cuda(const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v, const at::Tensor& candidate_to_user,
                                                             const std::optional<at::Tensor>& kv_lengths,
                                                             const std::optional<at::Tensor>& kv_offsets,
                                                             std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  auto [out, logsumexp] = attention_cuda(kAttentionLse, {}, arguments, true).target;
  return {std::move(out), std::move(logsumexp)};
}

std::tuple<at::Tensor, at::Tensor> self_and_target_attention_cuda(const at::Tensor& q_self, const at::Tensor& q,
                                                                  const at::Tensor& k, const at::Tensor& v,
                                                                  const at::Tensor& candidate_to_user,
                                                                  const std::optional<at::Tensor>& kv_lengths,
                                                                  const std::optional<at::Tensor>& kv_offsets,
                                                                  std::optional<double> scale) {
  const AttentionResults results =
      attention_cuda(kBoth, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false);
  return {results.self.out, results.target.out};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> self_and_target_attention_lse_cuda(
    const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
    const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const AttentionResults results =
      attention_cuda(kBothLse, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, true);
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
