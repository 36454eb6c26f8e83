// The schemas of torch.ops.ikbo. Exported archives carry them: arguments are only ever added, at the end, with
// defaults.
#include <ATen/FuncTorchTLS.h>
#include <torch/library.h>

#include "ops/checks.h"

namespace ikbo {
namespace {

// Every functorch transform (vmap, grad, jvp, functionalize) enters through this key. The operators' rows are already
// batched through their index and their gradients live in autograd, so a transform would silently take a slow or wrong
// path; it is refused in one place instead.
void refuse_functorch(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " does not support torch.func transforms (vmap, grad, jacrev, ...): call it outside the "
                              "transform, or use torch.autograd for gradients");
}

}  // namespace

TORCH_LIBRARY(ikbo, m) {
  m.def("broadcast(Tensor x_user, Tensor candidate_to_user) -> Tensor");
  m.def("broadcast_backward(Tensor grad, Tensor candidate_to_user, SymInt num_users) -> Tensor");
  m.def("aligned_cat(Tensor[] tensors, int dim) -> Tensor");
  m.def(
      "linear(Tensor x_cand, Tensor w_cand, Tensor[] x_bcast, Tensor[] w_bcast, Tensor[] index, Tensor? bias=None, "
      "str activation=\"none\") -> Tensor");
  m.def(
      "linear_backward(Tensor grad, Tensor? output, Tensor x_cand, Tensor w_cand, Tensor[] x_bcast, Tensor[] w_bcast, "
      "Tensor[] index, Tensor? bias, str activation, bool[] output_mask) -> Tensor[]");
  m.def(
      "linear_compression(Tensor w_cand, Tensor e_cand, Tensor[] w_bcast, Tensor[] e_bcast, Tensor[] index, *, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "linear_compression_backward(Tensor grad, Tensor w_cand, Tensor e_cand, Tensor[] w_bcast, Tensor[] e_bcast, "
      "Tensor[] index, bool[] output_mask) -> Tensor[]");
  m.def(
      "target_attention(Tensor q, Tensor k, Tensor v, Tensor candidate_to_user, *, Tensor? kv_lengths=None, "
      "Tensor? kv_offsets=None, float? scale=None) -> Tensor");
  m.def(
      "target_attention_lse(Tensor q, Tensor k, Tensor v, Tensor candidate_to_user, *, Tensor? kv_lengths=None, "
      "Tensor? kv_offsets=None, float? scale=None) -> (Tensor out, Tensor logsumexp)");
  m.def(
      "target_attention_backward(Tensor grad_out, Tensor? grad_logsumexp, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor logsumexp, Tensor candidate_to_user, Tensor? kv_lengths, Tensor? kv_offsets, float? scale) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "self_and_target_attention(Tensor q_self, Tensor q, Tensor k, Tensor v, Tensor candidate_to_user, *, "
      "Tensor? kv_lengths=None, Tensor? kv_offsets=None, float? scale=None) -> (Tensor self_out, Tensor target_out)");
  m.def(
      "self_and_target_attention_lse(Tensor q_self, Tensor q, Tensor k, Tensor v, Tensor candidate_to_user, *, "
      "Tensor? kv_lengths=None, Tensor? kv_offsets=None, float? scale=None) "
      "-> (Tensor self_out, Tensor self_logsumexp, Tensor target_out, Tensor target_logsumexp)");
  m.def(
      "self_and_target_attention_backward(Tensor grad_self_out, Tensor? grad_self_logsumexp, Tensor grad_target_out, "
      "Tensor? grad_target_logsumexp, Tensor q_self, Tensor q, Tensor k, Tensor v, Tensor self_out, "
      "Tensor self_logsumexp, Tensor target_out, Tensor target_logsumexp, Tensor candidate_to_user, "
      "Tensor? kv_lengths, Tensor? kv_offsets, float? scale) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(ikbo, FuncTorchDynamicLayerFrontMode, m) {
  for (const char* name :
       {"aligned_cat", "broadcast", "broadcast_backward", "linear", "linear_backward", "linear_compression",
        "linear_compression_backward", "target_attention", "target_attention_lse", "target_attention_backward",
        "self_and_target_attention", "self_and_target_attention_lse", "self_and_target_attention_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_functorch>());
  }
}

}  // namespace ikbo
