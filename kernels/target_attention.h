// Target attention that never copies the user: every candidate's n_seed query rows attend, without mask, to the history
// of the candidate's own user,
//
//   out[b, s, h] = softmax(scale q[b, s, h] K[u, :, g]^T) V[u, :, g]
//   u = candidate_to_user[b], g = h / (H_q / H_kv)
//
// with the softmax in fp32. Beside it, where they are given, the rows of self_q, one for each row of k, attend in the
// same launch to the history that they belong to. See docs/kernels/target_attention.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/scalar_type.h"

namespace ikbo::kernels {

// All pointers are to device memory, all strides in elements; D is contiguous in every tensor. Integers that make no
// sense read nothing outside the tensors: a candidate whose user is outside [0, users) gets NaN (and a NaN
// log-sum-exp); a length or offset outside its tensor counts as the nearest one inside; offsets that decrease do not
// say whose a row of self_q is: all of them get NaN.
struct TargetAttentionProblem {
  ScalarType type = ScalarType::kBFloat16;  // of q, k, v and out
  int64_t candidates = 0;                   // B_cand
  int64_t seeds = 0;                        // n_seed
  int64_t q_heads = 0;                      // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // D, 1 to 256
  int64_t users = 0;     // B_user
  // Padded histories: k and v are (users, length, kv_heads, D). Packed ones: (length, kv_heads, D), where length is the
  // rows of all users together, and kv_offsets is given.
  int64_t length = 0;
  double scale = 0;  // of the logits

  const void* q = nullptr;  // (candidates, seeds, q_heads, D)
  int64_t q_candidate_stride = 0;
  int64_t q_seed_stride = 0;
  int64_t q_head_stride = 0;
  const void* k = nullptr;
  int64_t k_user_stride = 0;  // padded histories only
  int64_t k_row_stride = 0;
  int64_t k_head_stride = 0;
  const void* v = nullptr;
  int64_t v_user_stride = 0;
  int64_t v_row_stride = 0;
  int64_t v_head_stride = 0;

  const int32_t* candidate_to_user = nullptr;  // (candidates), any order
  const int32_t* kv_lengths = nullptr;         // (users), padded histories: the valid prefix; all of it where null
  const int32_t* kv_offsets = nullptr;         // (users + 1), packed histories

  void* out = nullptr;        // (candidates, seeds, q_heads, D), contiguous
  void* logsumexp = nullptr;  // fp32 (fp64), (candidates, seeds, q_heads), contiguous, or null; -infinity: no history

  // Of self-attention, or null: (users, length, q_heads, D) or, of packed histories, (length, q_heads, D). Rows of no
  // history are not read; they get zeros and a log-sum-exp of -infinity.
  const void* self_q = nullptr;
  int64_t self_q_user_stride = 0;  // padded histories only
  int64_t self_q_row_stride = 0;
  int64_t self_q_head_stride = 0;
  void* self_out = nullptr;        // as self_q, contiguous
  void* self_logsumexp = nullptr;  // as self_q without D, contiguous, or null
};

// Whether target_attention serves the problem: fp32; or fp16 and bf16 with a scale that is not negative, rows of k and
// v that can be read 16 bytes at a time (aligned to 16 bytes, strides multiples of 8). Of queries of 16 bits that begin
// elsewhere, the memory in front of them may be read down to the multiple of 16 bytes before.
bool target_attention_supported(const TargetAttentionProblem& problem);

// Whether rows of queries of 16 bits that begin elsewhere come by the copy engine, several at a time. Where they do
// not, and D is above 128, it is faster to copy them to aligned rows first.
bool unaligned_queries_have_boxes(int64_t seeds, int64_t q_heads, int64_t kv_heads);

// Bytes of workspace that target_attention needs. What they hold before and after does not matter, and launches that
// follow each other on a stream (or in a graph) may share them. At least 256-byte aligned.
size_t target_attention_workspace_bytes(const TargetAttentionProblem& problem);

// Enqueues the computation on `stream` of the current device; reads nothing on the host and can be captured in a CUDA
// graph. Throws std::invalid_argument for a bad argument, naming it, and std::runtime_error for a CUDA error.
void target_attention(const TargetAttentionProblem& problem, void* workspace, size_t workspace_bytes,
                      cudaStream_t stream);

// The same function without self_q for any type, sizes and strides, slower and without workspace: what fp64 takes.
void target_attention_generic(const TargetAttentionProblem& problem, cudaStream_t stream);

}  // namespace ikbo::kernels
