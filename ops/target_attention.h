// What the forward and the backward operators of ikbo::target_attention share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace ikbo {

/// The arguments of ikbo::target_attention; sizes and meaning as in its schema.
struct AttentionArguments {
  const at::Tensor& q;                          // (B_cand, n_seed, H_q, D)
  const at::Tensor& k;                          // (B_user, L, H_kv, D), or (ΣL, H_kv, D) with kv_offsets
  const at::Tensor& v;                          // as k
  const at::Tensor& candidate_to_user;          // int32 (B_cand)
  const std::optional<at::Tensor>& kv_lengths;  // int32 (B_user): each user's valid prefix of L
  const std::optional<at::Tensor>& kv_offsets;  // int32 (B_user + 1): each user's rows of ΣL
  std::optional<double> scale;                  // of the logits; 1 / sqrt(D) where absent
};

/// Checks types, devices and (symbolic) sizes of all tensors against each other; not the values of integers.
void check_target_attention(std::string_view op, const AttentionArguments& arguments);

/// The same for the backward operator, with what it takes besides.
void check_target_attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp,
                                     const AttentionArguments& arguments, const at::Tensor& out,
                                     const at::Tensor& logsumexp);

/// The factor of the logits.
double attention_scale(const AttentionArguments& arguments);

/// Where the keys and values of each user lie in the flattened rows of k.
struct HistoryRows {
  std::vector<int64_t> first;   // (B_user), rows of k.view(-1, H_kv, D)
  std::vector<int64_t> length;  // (B_user)
};

/// Reads lengths or offsets and checks their values, as those of candidate_to_user. CPU tensors only. Throws ValueError
/// for a length outside [0, L] or offsets that decrease or leave k, IndexError for a user that does not exist.
HistoryRows history_rows(std::string_view op, const AttentionArguments& arguments);

/// torch.ops.ikbo.target_attention_backward through the dispatcher: the gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> call_target_attention_backward(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const AttentionArguments& arguments,
    const at::Tensor& out, const at::Tensor& logsumexp);

}  // namespace ikbo
