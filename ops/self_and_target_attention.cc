// ikbo::self_and_target_attention: target attention, and beside it the rows of q_self, each of which attends to the
// history of its own user.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "ops/checks.h"
#include "ops/linear.h"
#include "ops/target_attention.h"

namespace ikbo {

void check_self_and_target_attention(std::string_view op, const at::Tensor& q_self,
                                     const AttentionArguments& arguments) {
  check_target_attention(op, arguments);
  const auto& [q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale] = arguments;
  check_dense(op, q_self, "q_self", q, "q");
  check_same_dtype(op, q_self, "q_self", q, "q");
  if (kv_offsets.has_value()) {
    check_dim(op, q_self, "q_self", 3, "(ΣL, H_q, D), with kv_offsets");
  } else {
    check_dim(op, q_self, "q_self", 4, "(B_user, L, H_q, D)");
  }
  IKBO_CHECK_SIZE(q_self.sym_size(-1).sym_eq(q.sym_size(3)), op, ": q_self has D=", q_self.sym_size(-1),
                  " but q has D=", q.sym_size(3));
  IKBO_CHECK_SIZE(q_self.sym_size(-2).sym_eq(q.sym_size(2)), op, ": q_self has ", q_self.sym_size(-2),
                  " heads, expected ", q.sym_size(2), ", the heads of q");
  for (int64_t d = 0; d < k.dim() - 2; ++d) {
    IKBO_CHECK_SIZE(q_self.sym_size(d).sym_eq(k.sym_size(d)), op, ": q_self has shape ", q_self.sym_sizes(),
                    " but k has shape ", k.sym_sizes(), ", expected a row for each of its rows");
  }
}

SelfRows::SelfRows(const at::Tensor& q_self, const AttentionArguments& arguments)
    : packed_(arguments.kv_offsets.has_value()) {
  const auto options = q_self.options().dtype(at::kInt);
  if (!packed_) {
    candidate_to_user_ = at::arange(q_self.size(0), options);
    if (arguments.kv_lengths.has_value()) {
      nobody_ = at::arange(q_self.size(1), options).ge(arguments.kv_lengths->unsqueeze(1));
    }
    return;
  }
  const at::Tensor& offsets = *arguments.kv_offsets;
  const int64_t users = offsets.size(0) - 1;
  const at::Tensor rows = at::arange(q_self.size(0), options);
  // The last user whose history begins at or before the row.
  candidate_to_user_ = at::searchsorted(offsets.contiguous(), rows, /*out_int32=*/true, /*right=*/true)
                           .sub(1)
                           .clamp(0, std::max<int64_t>(users - 1, 0));
  nobody_ = rows.lt(offsets.select(0, 0)).logical_or(rows.ge(offsets.select(0, users)));
}

at::Tensor SelfRows::as_queries(const at::Tensor& rows, double value) const {
  return packed_ ? filled(rows, value).unsqueeze(1) : filled(rows, value);
}

at::Tensor SelfRows::as_rows(const at::Tensor& queries, double value) const {
  return filled(packed_ ? queries.squeeze(1) : queries, value);
}

at::Tensor SelfRows::filled(const at::Tensor& rows, double value) const {
  if (!nobody_.defined()) return rows;
  at::Tensor mask = nobody_;
  while (mask.dim() < rows.dim()) mask = mask.unsqueeze(-1);
  return rows.masked_fill(mask, value);
}

namespace {

constexpr const char* kBoth = "ikbo::self_and_target_attention";
constexpr const char* kBothLse = "ikbo::self_and_target_attention_lse";

using Outputs = std::tuple<at::Tensor, at::Tensor>;
using OutputsAndSums = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Outputs both_cpu(const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                 const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  AttentionResults results = attention_cpu(kBoth, q_self, arguments, false);
  return {std::move(results.self.out), std::move(results.target.out)};
}

OutputsAndSums both_lse_cpu(const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                            const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  AttentionResults results = attention_cpu(kBothLse, q_self, arguments, true);
  return {std::move(results.self.out), std::move(results.self.logsumexp), std::move(results.target.out),
          std::move(results.target.logsumexp)};
}

at::Tensor empty_like(const at::Tensor& q) {
  return at::empty_symint(q.sym_sizes(), q.options());
}

at::Tensor empty_sums(const at::Tensor& q) {
  const auto sizes = q.sym_sizes();
  return at::empty_symint(sizes.slice(0, sizes.size() - 1), q.options().dtype(sum_type(q.scalar_type())));
}

Outputs both_meta(const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                  const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  check_self_and_target_attention(kBoth, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale});
  return {empty_like(q_self), empty_like(q)};
}

OutputsAndSums both_lse_meta(const at::Tensor& q_self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                             const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  check_self_and_target_attention(kBothLse, q_self, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale});
  return {empty_like(q_self), empty_sums(q_self), empty_like(q), empty_sums(q)};
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("self_and_target_attention", both_cpu);
  m.impl("self_and_target_attention_lse", both_lse_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("self_and_target_attention", both_meta);
  m.impl("self_and_target_attention_lse", both_lse_meta);
}

}  // namespace ikbo
