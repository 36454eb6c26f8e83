// Target attention for callers without C++, such as the driver that measures it beside the public kernels.
#include <exception>
#include <string>

#include "kernels/target_attention.h"

namespace {

thread_local std::string last_error;

}  // namespace

extern "C" {

struct IkboAttentionCall {
  int64_t candidates, seeds, q_heads, kv_heads, head_dim, users, length;
  double scale;
  // All contiguous: q (candidates, seeds, q_heads, D), k and v (users, length, kv_heads, D), or (length, kv_heads, D)
  // with kv_offsets.
  const void *q, *k, *v;
  const int32_t *candidate_to_user, *kv_lengths, *kv_offsets;
  void* out;
  void* logsumexp;
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
  int32_t type;     // a ScalarType
  int32_t generic;  // the kernel without tensor cores
  // Contiguous as k, with q_heads heads; null: target attention alone.
  const void* self_q;
  void* self_out;
  void* self_logsumexp;
};

const char* ikbo_attention_error() {
  return last_error.c_str();
}

// Without a workspace: the bytes that it takes. With one: 0 once the call is enqueued. -1 is an error.
int64_t ikbo_attention(const IkboAttentionCall* call) {
  using namespace ikbo::kernels;
  try {
    TargetAttentionProblem p;
    p.type = static_cast<ScalarType>(call->type);
    p.candidates = call->candidates;
    p.seeds = call->seeds;
    p.q_heads = call->q_heads;
    p.kv_heads = call->kv_heads;
    p.head_dim = call->head_dim;
    p.users = call->users;
    p.length = call->length;
    p.scale = call->scale;
    p.q = call->q;
    p.k = call->k;
    p.v = call->v;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.head_dim;
    p.q_seed_stride = p.q_heads * p.head_dim;
    p.q_candidate_stride = p.seeds * p.q_seed_stride;
    p.k_row_stride = p.v_row_stride = p.kv_heads * p.head_dim;
    p.k_user_stride = p.v_user_stride = p.length * p.k_row_stride;
    p.candidate_to_user = call->candidate_to_user;
    p.kv_lengths = call->kv_lengths;
    p.kv_offsets = call->kv_offsets;
    p.out = call->out;
    p.logsumexp = call->logsumexp;
    p.self_q = call->self_q;
    p.self_q_head_stride = p.head_dim;
    p.self_q_row_stride = p.q_seed_stride;
    p.self_q_user_stride = p.length * p.self_q_row_stride;
    p.self_out = call->self_out;
    p.self_logsumexp = call->self_logsumexp;
    if (call->generic != 0) {
      target_attention_generic(p, static_cast<cudaStream_t>(call->stream));
      return 0;
    }
    if (call->workspace == nullptr) {
      return static_cast<int64_t>(target_attention_workspace_bytes(p));
    }
    target_attention(p, call->workspace, static_cast<size_t>(call->workspace_bytes),
                     static_cast<cudaStream_t>(call->stream));
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

}  // extern "C"
