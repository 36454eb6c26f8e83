// Gradients of target attention. Keys and values are never replicated: their gradients are sums over the candidates of
// their user, taken in an order that depends on these candidates alone. The softmax is made again from the log-sum-exp.
#pragma once

#include "kernels/target_attention.h"

namespace ikbo::kernels {

// `forward` names the inputs and the results of the forward pass (out and logsumexp, which is needed here). All tensors
// below are contiguous, of the shapes of what they belong to.
struct TargetAttentionGradients {
  TargetAttentionProblem forward;
  const void* grad_out = nullptr;        // of type
  const void* grad_logsumexp = nullptr;  // fp32 (fp64), or null
  // Candidates grouped by user: those of user u are order[begin[u]] ... order[begin[u + 1] - 1].
  const int64_t* order = nullptr;  // (candidates)
  const int64_t* begin = nullptr;  // (users + 1)
  void* grad_q = nullptr;          // of type, (candidates, seeds, q_heads, D)
  // Of type, (users, length, kv_heads, D) or (length, kv_heads, D). Rows that belong to no history are not written.
  void* grad_k = nullptr;
  void* grad_v = nullptr;
};

// Enqueues the computation on `stream`; reads nothing on the host and can be captured in a CUDA graph. Throws
// std::invalid_argument for a bad argument, naming it, and std::runtime_error for a CUDA error.
void target_attention_backward(const TargetAttentionGradients& gradients, cudaStream_t stream);

}  // namespace ikbo::kernels
