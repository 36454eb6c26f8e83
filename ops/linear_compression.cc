// ikbo::linear_compression: out[b] = W_cand E_cand[b] + Σ_t W_t E_t[index_t(b)].
#include "ops/linear_compression.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "ops/checks.h"
#include "ops/cpu/row_linear.h"
#include "ops/linear.h"

namespace ikbo {

void check_linear_compression(std::string_view op, const CompressionTensors& tensors) {
  const auto& [w_cand, e_cand, w_bcast, e_bcast, index] = tensors;
  const auto check_operand = [&op, &e = e_cand](const at::Tensor& tensor, std::string_view name, int64_t dim,
                                                std::string_view shape) {
    check_dense(op, tensor, name, e, "e_cand");
    check_same_dtype(op, tensor, name, e, "e_cand");
    check_dim(op, tensor, name, dim, shape);
  };
  check_operand(e_cand, "e_cand", 3, "(B_cand, K_cand, N)");
  check_floating(op, e_cand, "e_cand");
  check_operand(w_cand, "w_cand", 2, "(M, K_cand)");
  const c10::SymInt batch = e_cand.sym_size(0);
  const c10::SymInt width = e_cand.sym_size(2);
  const c10::SymInt rows = w_cand.sym_size(0);
  IKBO_CHECK_SIZE(w_cand.sym_size(1).sym_eq(e_cand.sym_size(1)), op, ": w_cand has K=", w_cand.sym_size(1),
                  " columns but e_cand has K=", e_cand.sym_size(1), " rows");
  TORCH_CHECK_VALUE(w_bcast.size() == e_bcast.size() && w_bcast.size() == index.size(), op, ": w_bcast has ",
                    w_bcast.size(), " tensors, e_bcast has ", e_bcast.size(), " and index has ", index.size(),
                    ", expected one of each for every broadcast term");
  for (size_t t = 0; t < e_bcast.size(); ++t) {
    const std::string w_name = element_name("w_bcast", t);
    const std::string e_name = element_name("e_bcast", t);
    const std::string index_name = element_name("index", t);
    check_operand(e_bcast[t], e_name, 3, "(B_t, K_t, N)");
    check_operand(w_bcast[t], w_name, 2, "(M, K_t)");
    IKBO_CHECK_SIZE(w_bcast[t].sym_size(0).sym_eq(rows), op, ": ", w_name, " has M=", w_bcast[t].sym_size(0),
                    " rows but w_cand has M=", rows, " rows");
    IKBO_CHECK_SIZE(w_bcast[t].sym_size(1).sym_eq(e_bcast[t].sym_size(1)), op, ": ", w_name,
                    " has K=", w_bcast[t].sym_size(1), " columns but ", e_name, " has K=", e_bcast[t].sym_size(1),
                    " rows");
    IKBO_CHECK_SIZE(e_bcast[t].sym_size(2).sym_eq(width), op, ": ", e_name, " has N=", e_bcast[t].sym_size(2),
                    " columns but e_cand has N=", width, " columns");
    check_index(op, index[t], index_name, e_cand, "e_cand");
    IKBO_CHECK_SIZE(index[t].sym_size(0).sym_eq(batch), op, ": ", index_name, " has ", index[t].sym_size(0),
                    " values, expected ", batch, ", the batch of e_cand");
  }
}

namespace {
constexpr const char* kCompression = "ikbo::linear_compression";
}

at::ScalarType linear_compression_type(const at::Tensor& e_cand, std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType type = e_cand.scalar_type();
  const at::ScalarType result = out_dtype.value_or(type);
  TORCH_CHECK_TYPE(result == type || result == sum_type(type), kCompression, ": out_dtype is ", result, ", expected ",
                   type, ", the dtype of e_cand, or ", sum_type(type), ", the dtype that sums are kept in");
  return result;
}

namespace {

// W E for one E of a batch: rows of W times the columns of E, (M, N) at `out`.
template <typename T, typename Out>
cpu::RowLinear<T, Out> product(const at::Tensor& w, const at::Tensor& e, int64_t row, Out* out, int64_t out_stride) {
  return {.x = w.const_data_ptr<T>(),
          .x_row_stride = w.stride(0),
          .x_col_stride = w.stride(1),
          .batch = w.size(0),
          .k = w.size(1),
          .w = e.const_data_ptr<T>() + row * e.stride(0),
          .w_row_stride = e.stride(2),
          .w_col_stride = e.stride(1),
          .n = e.size(2),
          .out = out,
          .out_row_stride = out_stride};
}

// Calls f(row) for every row of a batch, `work` multiply-adds each: rows spread over the threads where there are enough
// of them; a few run one after the other and each spreads its own work.
template <typename F>
void for_each_row(int64_t rows, int64_t work, const F& f) {
  const bool enough = rows >= 2 * at::get_num_threads();
  const int64_t grain = enough ? cpu::kGrainWork / std::max<int64_t>(work, 1) + 1 : rows;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

template <typename T, typename Out>
void compute(const CompressionTensors& tensors, at::TensorList index, at::Tensor& result) {
  using Acc = cpu::AccOf<T>;
  const auto& [w_cand, e_cand, w_bcast, e_bcast, unused] = tensors;
  const int64_t m = result.size(1);
  const int64_t n = result.size(2);
  const int64_t width = cpu::packed_width<Acc>(n);
  const auto sums = result.options().dtype(c10::CppTypeToScalarType<Acc>::value);
  std::vector<int32_t> own_row(static_cast<size_t>(m));
  std::iota(own_row.begin(), own_row.end(), 0);

  // Every user's part once, unrounded; users without candidates are not read.
  std::vector<at::Tensor> projected;
  std::vector<const int32_t*> user_of;
  for (size_t t = 0; t < index.size(); ++t) {
    const int64_t users = e_bcast[t].size(0);
    user_of.push_back(index[t].template const_data_ptr<int32_t>());
    std::vector<char> used(static_cast<size_t>(users), 0);
    for (int64_t b = 0; b < result.size(0); ++b) used[static_cast<size_t>(user_of[t][b])] = 1;
    projected.push_back(at::empty({users, m, width}, sums));
    Acc* to = projected.back().template mutable_data_ptr<Acc>();
    for_each_row(users, m * n * w_bcast[t].size(1), [&](int64_t u) {
      if (used[static_cast<size_t>(u)]) cpu::run(product<T, Acc>(w_bcast[t], e_bcast[t], u, to + u * m * width, width));
    });
  }
  Out* out = result.mutable_data_ptr<Out>();
  for_each_row(result.size(0), m * n * w_cand.size(1), [&](int64_t b) {
    std::vector<cpu::GatheredRows<Acc>> terms;
    for (size_t t = 0; t < projected.size(); ++t) {
      const Acc* rows = projected[t].template const_data_ptr<Acc>() + user_of[t][b] * m * width;
      terms.push_back({rows, width, own_row.data()});
    }
    auto job = product<T, Out>(w_cand, e_cand, b, out + b * m * n, n);
    job.terms = terms.data();
    job.num_terms = static_cast<int64_t>(terms.size());
    cpu::run(job);
  });
}

at::Tensor linear_compression_cpu(const at::Tensor& w_cand, const at::Tensor& e_cand, at::TensorList w_bcast,
                                  at::TensorList e_bcast, at::TensorList index,
                                  std::optional<at::ScalarType> out_dtype) {
  const CompressionTensors tensors{w_cand, e_cand, w_bcast, e_bcast, index};
  check_linear_compression(kCompression, tensors);
  const at::ScalarType type = e_cand.scalar_type();
  const at::ScalarType out_type = linear_compression_type(e_cand, out_dtype);
  std::vector<at::Tensor> dense_index;
  for (size_t t = 0; t < index.size(); ++t) {
    dense_index.push_back(index[t].contiguous());
    check_index_values(kCompression, dense_index[t], element_name("index", t), e_bcast[t].size(0),
                       element_name("e_bcast", t));
  }
  at::Tensor result = at::empty({e_cand.size(0), w_cand.size(0), e_cand.size(2)}, e_cand.options().dtype(out_type));
  if (result.numel() == 0) return result;
  if (type == at::kDouble) {
    compute<double, double>(tensors, dense_index, result);
  } else if (type == at::kFloat) {
    compute<float, float>(tensors, dense_index, result);
  } else if (type == at::kBFloat16 && out_type == at::kFloat) {
    compute<c10::BFloat16, float>(tensors, dense_index, result);
  } else if (type == at::kBFloat16) {
    compute<c10::BFloat16, c10::BFloat16>(tensors, dense_index, result);
  } else if (out_type == at::kFloat) {
    compute<c10::Half, float>(tensors, dense_index, result);
  } else {
    compute<c10::Half, c10::Half>(tensors, dense_index, result);
  }
  return result;
}

at::Tensor linear_compression_meta(const at::Tensor& w_cand, const at::Tensor& e_cand, at::TensorList w_bcast,
                                   at::TensorList e_bcast, at::TensorList index,
                                   std::optional<at::ScalarType> out_dtype) {
  check_linear_compression(kCompression, {w_cand, e_cand, w_bcast, e_bcast, index});
  return at::empty_symint({e_cand.sym_size(0), w_cand.sym_size(0), e_cand.sym_size(2)},
                          e_cand.options().dtype(linear_compression_type(e_cand, out_dtype)));
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("linear_compression", linear_compression_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("linear_compression", linear_compression_meta);
}

}  // namespace ikbo
