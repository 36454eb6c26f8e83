// What the operators of ikbo::target_attention and ikbo::self_and_target_attention, forward and backward, share.
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

/// The same with q_self, whose rows attend to the history that they stand beside: (B_user, L, H_q, D), or packed
/// (ΣL, H_q, D) with kv_offsets.
void check_self_and_target_attention(std::string_view op, const at::Tensor& q_self,
                                     const AttentionArguments& arguments);

/// Checks what belongs to a result of attention, in a backward operator: `grad` and `out` must be of the shape of the
/// queries `q`, `logsumexp` and its gradient of that shape without D. `prefix` is put in front of their names.
void check_attention_gradients(std::string_view op, std::string_view prefix, const at::Tensor& q,
                               const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp,
                               const at::Tensor& out, const at::Tensor& logsumexp);

/// check_target_attention for the backward operator, with what it takes besides.
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

/// What queries get: `out` of their shape, and the log-sum-exp of their logits, without D, in the type of sums;
/// undefined where nobody asked for it.
struct AttentionResult {
  at::Tensor out;
  at::Tensor logsumexp;
};

/// Of q_self and of q; the first is undefined without q_self.
struct AttentionResults {
  AttentionResult self;
  AttentionResult target;
};

/// Target attention on the CPU, and self-attention over the same histories where q_self is given. Checks everything.
AttentionResults attention_cpu(std::string_view op, const std::optional<at::Tensor>& q_self,
                               const AttentionArguments& arguments, bool with_logsumexp);

/// The rows of q_self as queries of target attention, for whatever computes both in two calls: a user's rows are the
/// seeds of one candidate or, of packed histories, every row is a candidate. Nothing is read on the host.
class SelfRows {
 public:
  SelfRows(const at::Tensor& q_self, const AttentionArguments& arguments);

  /// Int32; rows of no history have some user that exists, if there is any.
  const at::Tensor& candidate_to_user() const { return candidate_to_user_; }
  /// A tensor of q_self's rows in the form of the queries, with `value` in the rows of no history.
  at::Tensor as_queries(const at::Tensor& rows, double value) const;
  /// The other way round.
  at::Tensor as_rows(const at::Tensor& queries, double value) const;

 private:
  at::Tensor filled(const at::Tensor& rows, double value) const;

  bool packed_;
  at::Tensor candidate_to_user_;
  at::Tensor nobody_;  // bool, (B_user, L) or (ΣL): rows of no history; undefined where there can be none
};

/// torch.ops.ikbo.target_attention_backward through the dispatcher: the gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> call_target_attention_backward(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_logsumexp, const AttentionArguments& arguments,
    const at::Tensor& out, const at::Tensor& logsumexp);

/// What torch.ops.ikbo.self_and_target_attention_backward takes of one of the two results, and its gradients.
struct AttentionGradients {
  const at::Tensor& grad_out;
  const std::optional<at::Tensor>& grad_logsumexp;
  const at::Tensor& out;
  const at::Tensor& logsumexp;
};

/// The same of torch.ops.ikbo.self_and_target_attention_backward: the gradients of q_self, q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> call_self_and_target_attention_backward(
    const at::Tensor& q_self, const AttentionArguments& arguments, const AttentionGradients& self,
    const AttentionGradients& target);

}  // namespace ikbo
