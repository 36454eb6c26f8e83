// ikbo::target_attention: the seeds of every candidate attend, without mask, to the history of the candidate's user.
#include "ops/target_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
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
  bool self;  // of q_self
};

template <typename T>
T* row_of(const at::Tensor& tensor, int64_t offset) {
  return tensor.defined() ? tensor.mutable_data_ptr<T>() + offset : nullptr;
}

template <typename T>
void compute(const std::optional<at::Tensor>& q_self, const AttentionArguments& arguments, const HistoryRows& history,
             const AttentionResults& results) {
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
  const int64_t dim = q.size(3);
  const auto scale = static_cast<Acc>(attention_scale(arguments));
  const CandidatesByUser candidates = group_by_user(arguments.candidate_to_user.contiguous(), users);

  std::vector<Chunk> chunks;
  int64_t work = 0;
  for (int64_t u = 0; u < users; ++u) {
    const auto i = static_cast<size_t>(u);
    const int64_t length = history.length[i];
    const int64_t target_rows = (candidates.begin[i + 1] - candidates.begin[i]) * q.size(1) * group;
    const int64_t self_rows = q_self.has_value() ? length * group : 0;
    work += 2 * (target_rows + self_rows) * kv_heads * length * dim;
    for (int64_t head = 0; head < kv_heads; ++head) {
      for (const auto& [rows, self] : {std::pair{target_rows, false}, std::pair{self_rows, true}}) {
        for (int64_t row = 0; row < rows; row += cpu::kAttentionRows) {
          chunks.push_back({u, head, row, std::min(cpu::kAttentionRows, rows - row), self});
        }
      }
    }
  }
  const auto task_of = [&](const Chunk& chunk) {
    const auto u = static_cast<size_t>(chunk.user);
    // Of the user's first row of k, v or q_self.
    const auto start = [&](const at::Tensor& tensor) {
      return packed ? history.first[u] * tensor.stride(0) : chunk.user * tensor.stride(0);
    };
    const auto base = [&](const at::Tensor& tensor) {
      return tensor.const_data_ptr<Acc>() + start(tensor) + chunk.head * tensor.stride(-2);
    };
    const at::Tensor& queries = chunk.self ? *q_self : q;
    const AttentionResult& result = chunk.self ? results.self : results.target;
    // A user's rows of q_self are the seeds of one candidate.
    static constexpr int64_t kFirst = 0;
    const int64_t first_row = chunk.head * group + (chunk.self ? history.first[u] * q_heads : 0);
    return cpu::AttentionTask<T>{
        .q = queries.const_data_ptr<T>() + chunk.head * group * queries.stride(-2) + (chunk.self ? start(queries) : 0),
        .q_candidate_stride = queries.stride(0),
        .q_seed_stride = queries.stride(-3),
        .q_head_stride = queries.stride(-2),
        .q_col_stride = queries.stride(-1),
        .candidates = chunk.self ? &kFirst : candidates.candidate.data() + candidates.begin[u],
        .seeds = chunk.self ? history.length[u] : q.size(1),
        .group = group,
        .dim = dim,
        .k = base(k),
        .k_row_stride = k.stride(-3),
        .k_col_stride = k.stride(-1),
        .v = base(v),
        .v_row_stride = v.stride(-3),
        .v_col_stride = v.stride(-1),
        .length = history.length[u],
        .scale = scale,
        .out = row_of<T>(result.out, first_row * dim),
        .out_stride = q.size(1) * q_heads * dim,
        .out_heads = q_heads,
        .logsumexp = row_of<Acc>(result.logsumexp, first_row)};
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

}  // namespace

AttentionResults attention_cpu(std::string_view op, const std::optional<at::Tensor>& q_self,
                               const AttentionArguments& arguments, bool with_logsumexp) {
  if (q_self.has_value()) {
    check_self_and_target_attention(op, *q_self, arguments);
  } else {
    check_target_attention(op, arguments);
  }
  const HistoryRows history = history_rows(op, arguments);
  const at::Tensor& q = arguments.q;
  const auto type = q.scalar_type();
  const auto options = q.options().memory_format(at::MemoryFormat::Contiguous);
  const auto sums = q.options().dtype(sum_type(type));
  AttentionResults results;
  results.target.out = at::empty(q.sizes(), options);
  if (with_logsumexp) results.target.logsumexp = at::empty(q.sizes().slice(0, 3), sums);
  if (q_self.has_value()) {
    // What rows of no history keep.
    results.self.out = at::zeros(q_self->sizes(), options);
    if (with_logsumexp) {
      results.self.logsumexp =
          at::full(q_self->sizes().slice(0, q_self->dim() - 1), -std::numeric_limits<double>::infinity(), sums);
    }
  }
  if (type == at::kDouble) {
    compute<double>(q_self, arguments, history, results);
  } else if (type == at::kFloat) {
    compute<float>(q_self, arguments, history, results);
  } else if (type == at::kBFloat16) {
    compute<c10::BFloat16>(q_self, arguments, history, results);
  } else {
    compute<c10::Half>(q_self, arguments, history, results);
  }
  return results;
}

namespace {

constexpr const char* kAttention = "ikbo::target_attention";
constexpr const char* kAttentionLse = "ikbo::target_attention_lse";

at::Tensor target_attention_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& candidate_to_user, const std::optional<at::Tensor>& kv_lengths,
                                const std::optional<at::Tensor>& kv_offsets, std::optional<double> scale) {
  return attention_cpu(kAttention, {}, {q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale}, false).target.out;
}

std::tuple<at::Tensor, at::Tensor> target_attention_lse_cpu(const at::Tensor& q, const at::Tensor& k,
                                                            const at::Tensor& v, const at::Tensor& candidate_to_user,
                                                            const std::optional<at::Tensor>& kv_lengths,
                                                            const std::optional<at::Tensor>& kv_offsets,
                                                            std::optional<double> scale) {
  const AttentionArguments arguments{q, k, v, candidate_to_user, kv_lengths, kv_offsets, scale};
  auto [out, logsumexp] = attention_cpu(kAttentionLse, {}, arguments, true).target;
  return {std::move(out), std::move(logsumexp)};
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
