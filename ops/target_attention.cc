// ikbo::target_attention: the seeds of every candidate attend, without mask, to the history of the candidate's user.
#include "ops/target_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/cpu/attention.h"
#include "ops/linear.h"
#include "ops/segment_sum.h"

namespace ikbo {

void check_target_attention(std::string_view op, const AttentionArguments& arguments) {
  const auto& [q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale] = arguments;
  const bool packed = kv_offsets.has_value();
  check_dense(op, q, "q", q, "q");
  check_floating(op, q, "q");
  check_dim(op, q, "q", 4, "(B_cand, n_seed, H_q, D)");
  TORCH_CHECK_VALUE(!packed || !kv_lengths.has_value(), op,
                    ": kv_lengths and kv_offsets are both given, expected one of them: lengths of padded histories or "
                    "offsets of packed ones");
  for (const auto& [tensor, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check_dense(op, *tensor, name, q, "q");
    check_same_dtype(op, *tensor, name, q, "q");
    if (packed) {
      check_dim(op, *tensor, name, 3, "(ΣL, H_kv, D), with kv_offsets");
    } else {
      check_dim(op, *tensor, name, 4, "(B_user, L, H_kv, D)");
    }
    IKBO_CHECK_SIZE(tensor->sym_size(-1).sym_eq(q.sym_size(3)), op, ": ", name, " has D=", tensor->sym_size(-1),
                    " but q has D=", q.sym_size(3));
  }
  for (int64_t d = 0; d < k.dim() - 1; ++d) {
    IKBO_CHECK_SIZE(k.sym_size(d).sym_eq(v.sym_size(d)), op, ": v has shape ", v.sym_sizes(), ", expected ",
                    k.sym_sizes(), ", the shape of k");
  }
  IKBO_CHECK_SIZE(q.sym_size(3).sym_ge(1), op, ": q has D=0, expected at least 1");
  const c10::SymInt heads = k.sym_size(-2);
  IKBO_CHECK_SIZE(heads.sym_ge(1), op, ": k has no heads, expected H_kv at least 1");
  IKBO_CHECK_SIZE((q.sym_size(2) % heads).sym_eq(0), op, ": q has ", q.sym_size(2),
                  " heads, expected a multiple of the ", heads, " heads of k");
  check_index(op, candidate_to_user, "candidate_to_user", q, "q");
  IKBO_CHECK_SIZE(candidate_to_user.sym_size(0).sym_eq(q.sym_size(0)), op, ": candidate_to_user has ",
                  candidate_to_user.sym_size(0), " values, expected ", q.sym_size(0), ", the batch of q");
  const auto check_integers = [&, &like = q](const at::Tensor& tensor, std::string_view name, std::string_view shape) {
    check_dense(op, tensor, name, like, "q");
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, op, ": ", name, " has dtype ", tensor.scalar_type(),
                     ", expected Int (int32)");
    check_dim(op, tensor, name, 1, shape);
  };
  if (kv_lengths.has_value()) {
    check_integers(*kv_lengths, "kv_lengths", "(B_user)");
    IKBO_CHECK_SIZE(kv_lengths->sym_size(0).sym_eq(k.sym_size(0)), op, ": kv_lengths has ", kv_lengths->sym_size(0),
                    " values, expected ", k.sym_size(0), ", the batch of k");
  }
  if (packed) {
    check_integers(*kv_offsets, "kv_offsets", "(B_user + 1)");
    IKBO_CHECK_SIZE(kv_offsets->sym_size(0).sym_ge(1), op, ": kv_offsets is empty, expected B_user + 1 values");
  }
}

double attention_scale(const AttentionArguments& arguments) {
  return arguments.scale.value_or(1 / std::sqrt(static_cast<double>(arguments.q.size(3))));
}

HistoryRows history_rows(std::string_view op, const AttentionArguments& arguments) {
  HistoryRows rows;
  if (arguments.kv_offsets.has_value()) {
    const at::Tensor offsets = arguments.kv_offsets->contiguous();
    const int32_t* values = offsets.const_data_ptr<int32_t>();
    const int64_t total = arguments.k.size(0);
    TORCH_CHECK_VALUE(values[0] >= 0, op, ": kv_offsets[0] = ", values[0], ", expected 0 or more");
    for (int64_t u = 0; u + 1 < offsets.numel(); ++u) {
      TORCH_CHECK_VALUE(values[u + 1] >= values[u], op, ": kv_offsets[", u + 1, "] = ", values[u + 1],
                        " is less than kv_offsets[", u, "] = ", values[u]);
      rows.first.push_back(values[u]);
      rows.length.push_back(values[u + 1] - values[u]);
    }
    const int32_t end = values[offsets.numel() - 1];
    TORCH_CHECK_VALUE(end <= total, op, ": kv_offsets[", offsets.numel() - 1, "] = ", end, ", but k has ", total,
                      " rows");
  } else {
    const int64_t users = arguments.k.size(0);
    const int64_t padded = arguments.k.size(1);
    at::Tensor lengths;
    if (arguments.kv_lengths.has_value()) lengths = arguments.kv_lengths->contiguous();
    const int32_t* values = lengths.defined() ? lengths.const_data_ptr<int32_t>() : nullptr;
    for (int64_t u = 0; u < users; ++u) {
      const int64_t length = values != nullptr ? values[u] : padded;
      TORCH_CHECK_VALUE(length >= 0 && length <= padded, op, ": kv_lengths[", u, "] = ", length,
                        ", expected 0 to L = ", padded);
      rows.first.push_back(u * padded);
      rows.length.push_back(length);
    }
  }
  check_index_values(op, arguments.candidate_to_user.contiguous(), "candidate_to_user",
                     static_cast<int64_t>(rows.first.size()), arguments.kv_offsets.has_value() ? "kv_offsets" : "k");
  return rows;
}

namespace {

// One chunk of a task's rows.
struct Chunk {
  int64_t user;
  int64_t head;
  int64_t row;
  int64_t rows;
};

template <typename T>
void compute(const AttentionArguments& arguments, const HistoryRows& history, double scale, at::Tensor& out,
             const at::Tensor& logsumexp) {
  using Acc = cpu::AccOf<T>;
  const at::Tensor& q = arguments.q;
  const bool packed = arguments.kv_offsets.has_value();
  // 16-bit keys and values are widened once, at the user batch.
  const auto type = c10::CppTypeToScalarType<Acc>::value;
  const at::Tensor k = arguments.k.to(type);
  const at::Tensor v = arguments.v.to(type);
  const int64_t users = static_cast<int64_t>(history.first.size());
  const int64_t kv_heads = k.size(-2);
  const int64_t q_heads = q.size(2);
  const int64_t group = q_heads / kv_heads;
  const CandidatesByUser candidates = group_by_user(arguments.candidate_to_user.contiguous(), users);
  const auto count = [&](int64_t u) {
    return candidates.begin[static_cast<size_t>(u) + 1] - candidates.begin[static_cast<size_t>(u)];
  };

  std::vector<Chunk> chunks;
  int64_t work = 0;
  for (int64_t u = 0; u < users; ++u) {
    const int64_t rows = count(u) * q.size(1) * group;
    work += 2 * rows * kv_heads * history.length[static_cast<size_t>(u)] * q.size(3);
    for (int64_t head = 0; head < kv_heads; ++head) {
      for (int64_t row = 0; row < rows; row += cpu::kAttentionRows) {
        chunks.push_back({u, head, row, std::min(cpu::kAttentionRows, rows - row)});
      }
    }
  }
  const auto task_of = [&](const Chunk& chunk) {
    const auto u = static_cast<size_t>(chunk.user);
    const auto base = [&](const at::Tensor& tensor) {
      const int64_t row_stride = tensor.stride(packed ? 0 : 1);
      const int64_t start = packed ? history.first[u] * row_stride : chunk.user * tensor.stride(0);
      return tensor.const_data_ptr<Acc>() + start + chunk.head * tensor.stride(-2);
    };
    return cpu::AttentionTask<T>{
        .q = q.const_data_ptr<T>() + chunk.head * group * q.stride(2),
        .q_candidate_stride = q.stride(0),
        .q_seed_stride = q.stride(1),
        .q_head_stride = q.stride(2),
        .q_col_stride = q.stride(3),
        .candidates = candidates.candidate.data() + candidates.begin[u],
        .seeds = q.size(1),
        .group = group,
        .dim = q.size(3),
        .k = base(k),
        .k_row_stride = k.stride(packed ? 0 : 1),
        .k_col_stride = k.stride(-1),
        .v = base(v),
        .v_row_stride = v.stride(packed ? 0 : 1),
        .v_col_stride = v.stride(-1),
        .length = history.length[u],
        .scale = static_cast<Acc>(scale),
        .out = out.mutable_data_ptr<T>() + chunk.head * group * q.size(3),
        .out_stride = out.stride(0),
        .out_heads = q_heads,
        .logsumexp = logsumexp.defined() ? logsumexp.mutable_data_ptr<Acc>() + chunk.head * group : nullptr};
  };
  // Histories differ in length, so each thread takes the next chunk when it is done with its last.
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), work / cpu::kGrainWork + 1);
  std::atomic<size_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t /*begin*/, int64_t /*end*/) {
    for (size_t i = next++; i < chunks.size(); i = next++) {
      cpu::attend(task_of(chunks[i]), chunks[i].row, chunks[i].rows);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> attention_cpu(const char* op, const AttentionArguments& arguments,
                                                 bool with_logsumexp) {
  check_target_attention(op, arguments);
  const HistoryRows history = history_rows(op, arguments);
  const at::Tensor& q = arguments.q;
  const auto type = q.scalar_type();
  at::Tensor out = at::empty(q.sizes(), q.options().memory_format(at::MemoryFormat::Contiguous));
  at::Tensor logsumexp;
  if (with_logsumexp) {
    logsumexp = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(sum_type(type)));
  }
  if (out.numel() == 0) return {out, logsumexp};
  const double scale = attention_scale(arguments);
  if (type == at::kDouble) {
    compute<double>(arguments, history, scale, out, logsumexp);
  } else if (type == at::kFloat) {
    compute<float>(arguments, history, scale, out, logsumexp);
  } else if (type == at::kBFloat16) {
    compute<c10::BFloat16>(arguments, history, scale, out, logsumexp);
  } else {
    compute<c10::Half>(arguments, history, scale, out, logsumexp);
  }
  return {out, logsumexp};
}

constexpr const char* kAttention = "ikbo::target_attention";
constexpr const char* kAttentionLse = "ikbo::target_attention_lse";

at::Tensor target_attention_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  return std::get<0>(attention_cpu(kAttention, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false));
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_cpu(const at::Tensor& q, const at::Tensor& k,
                                                            const at::Tensor& v, const at::Tensor& candidate_to_user,
                                                            const std::optional<at::Tensor>& kv_lengths,
                                                            const std::optional<at::Tensor>& kv_offsets,
                                                            std::optional<double> scale) {
  return attention_cpu(kAttentionLse, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, true);
}

at::Tensor target_attention_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                 const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  check_target_attention(kAttention, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale});
  return at::empty_symint(q.sym_sizes(), q.options());
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_meta(const at::Tensor& q, const at::Tensor& k,
                                                             const at::Tensor& v, const at::Tensor& candidate_to_user,
                                                             const std::optional<at::Tensor>& kv_lengths,
                                                             const std::optional<at::Tensor>& kv_offsets,
                                                             std::optional<double> scale) {
  check_target_attention(kAttentionLse, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale});
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(q.sym_sizes().slice(0, 3), q.options().dtype(sum_type(q.scalar_type())))};
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("target_attention", target_attention_cpu);
  m.impl("target_attention_lse", target_attention_lse_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("target_attention", target_attention_meta);
  m.impl("target_attention_lse", target_attention_lse_meta);
}

}  // namespace ikbo
