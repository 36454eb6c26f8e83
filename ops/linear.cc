// ikbo::linear: y[b] = act(W_cand x_cand[b] + Σ_t W_t x_t[index_t(b)] + bias).
#include "ops/linear.h"

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/checks.h"

namespace ikbo {

cpu::Activation parse_activation(std::string_view op, std::string_view name) {
  using cpu::Activation;
  constexpr std::pair<std::string_view, Activation> kNames[] = {
      {"none", Activation::kNone}, {"relu", Activation::kRelu}, {"sigmoid", Activation::kSigmoid},
      {"tanh", Activation::kTanh}, {"silu", Activation::kSilu}, {"gelu", Activation::kGelu}};
  for (const auto& [known, activation] : kNames) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": activation is \"", name, "\", expected none, relu, sigmoid, tanh, silu or gelu");
}

bool derivative_from_output(cpu::Activation activation) {
  return activation == cpu::Activation::kRelu || activation == cpu::Activation::kSigmoid ||
         activation == cpu::Activation::kTanh;
}

at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

void check_linear(std::string_view op, const LinearTensors& tensors) {
  const auto& [x_cand, w_cand, x_bcast, w_bcast, index, bias] = tensors;
  const auto check_operand = [&op, &x = x_cand](const at::Tensor& tensor, std::string_view name, int64_t dim,
                                                std::string_view shape) {
    check_dense(op, tensor, name, x, "x_cand");
    check_same_dtype(op, tensor, name, x, "x_cand");
    check_dim(op, tensor, name, dim, shape);
  };
  check_operand(x_cand, "x_cand", 2, "(B_cand, K_cand)");
  check_floating(op, x_cand, "x_cand");
  check_operand(w_cand, "w_cand", 2, "(N, K_cand)");
  const c10::SymInt batch = x_cand.sym_size(0);
  const c10::SymInt features = w_cand.sym_size(0);
  IKBO_CHECK_SIZE(w_cand.sym_size(1).sym_eq(x_cand.sym_size(1)), op, ": w_cand has K=", w_cand.sym_size(1),
                  " columns but x_cand has K=", x_cand.sym_size(1), " columns");
  TORCH_CHECK_VALUE(x_bcast.size() == w_bcast.size() && x_bcast.size() == index.size(), op, ": x_bcast has ",
                    x_bcast.size(), " tensors, w_bcast has ", w_bcast.size(), " and index has ", index.size(),
                    ", expected one of each for every broadcast term");
  for (size_t t = 0; t < x_bcast.size(); ++t) {
    const std::string x_name = element_name("x_bcast", t);
    const std::string w_name = element_name("w_bcast", t);
    const std::string index_name = element_name("index", t);
    check_operand(x_bcast[t], x_name, 2, "(B_t, K_t)");
    check_operand(w_bcast[t], w_name, 2, "(N, K_t)");
    IKBO_CHECK_SIZE(w_bcast[t].sym_size(0).sym_eq(features), op, ": ", w_name, " has ", w_bcast[t].sym_size(0),
                    " rows, expected ", features, ", the rows of w_cand");
    IKBO_CHECK_SIZE(w_bcast[t].sym_size(1).sym_eq(x_bcast[t].sym_size(1)), op, ": ", w_name,
                    " has K=", w_bcast[t].sym_size(1), " columns but ", x_name, " has K=", x_bcast[t].sym_size(1),
                    " columns");
    check_index(op, index[t], index_name, x_cand, "x_cand");
    IKBO_CHECK_SIZE(index[t].sym_size(0).sym_eq(batch), op, ": ", index_name, " has ", index[t].sym_size(0),
                    " values, expected ", batch, ", the rows of x_cand");
  }
  if (bias.has_value()) {
    check_operand(*bias, "bias", 1, "(N)");
    IKBO_CHECK_SIZE(bias->sym_size(0).sym_eq(features), op, ": bias has ", bias->sym_size(0), " values, expected ",
                    features, ", the rows of w_cand");
  }
}

namespace {

constexpr const char* kLinear = "ikbo::linear";

template <typename T, typename Out>
cpu::RowLinear<T, Out> product(const at::Tensor& x, const at::Tensor& w, Out* out, int64_t out_row_stride) {
  return {.x = x.const_data_ptr<T>(),
          .x_row_stride = x.size(1) == 0 ? 0 : x.stride(0),  // an empty tensor has no address to step from
          .x_col_stride = x.stride(1),
          .batch = x.size(0),
          .k = x.size(1),
          .w = w.const_data_ptr<T>(),
          .w_row_stride = w.stride(0),
          .w_col_stride = w.stride(1),
          .n = w.size(0),
          .out = out,
          .out_row_stride = out_row_stride};
}

template <typename T, typename Out>
void compute(const LinearTensors& tensors, at::TensorList index, cpu::Activation activation, at::Tensor& result) {
  using Acc = cpu::AccOf<T>;
  const int64_t features = tensors.w_cand.size(0);
  const int64_t width = cpu::packed_width<Acc>(features);
  const auto sums = result.options().dtype(c10::CppTypeToScalarType<Acc>::value);
  // Every request-only operand is projected once, at its own batch and unrounded; candidates then only look rows up.
  std::vector<at::Tensor> projected;
  std::vector<cpu::GatheredRows<Acc>> terms;
  for (size_t t = 0; t < index.size(); ++t) {
    const at::Tensor& x = tensors.x_bcast[t];
    projected.push_back(at::empty({x.size(0), width}, sums));
    Acc* rows = projected.back().template mutable_data_ptr<Acc>();
    cpu::run(product<T, Acc>(x, tensors.w_bcast[t], rows, width));
    terms.push_back({rows, width, index[t].template const_data_ptr<int32_t>()});
  }
  std::vector<Acc> bias;
  if (tensors.bias.has_value()) {
    const at::Tensor values = tensors.bias->contiguous();
    const T* from = values.template const_data_ptr<T>();
    bias.resize(static_cast<size_t>(width));
    for (int64_t n = 0; n < features; ++n) bias[static_cast<size_t>(n)] = static_cast<Acc>(from[n]);
  }
  auto job = product<T, Out>(tensors.x_cand, tensors.w_cand, result.mutable_data_ptr<Out>(), features);
  job.terms = terms.data();
  job.num_terms = static_cast<int64_t>(terms.size());
  job.bias = bias.empty() ? nullptr : bias.data();
  job.activation = activation;
  cpu::run(job);
}

}  // namespace

at::Tensor compute_linear_cpu(std::string_view op, const LinearTensors& tensors, cpu::Activation activation,
                              bool keep_sum_type) {
  std::vector<at::Tensor> index;
  for (size_t t = 0; t < tensors.index.size(); ++t) {
    index.push_back(tensors.index[t].contiguous());
    check_index_values(op, index[t], element_name("index", t), tensors.x_bcast[t].size(0), element_name("x_bcast", t));
  }
  const auto type = tensors.x_cand.scalar_type();
  at::Tensor result = at::empty({tensors.x_cand.size(0), tensors.w_cand.size(0)},
                                tensors.x_cand.options().dtype(keep_sum_type ? sum_type(type) : type));
  if (result.numel() == 0) return result;
  if (type == at::kDouble) {
    compute<double, double>(tensors, index, activation, result);
  } else if (type == at::kFloat) {
    compute<float, float>(tensors, index, activation, result);
  } else if (type == at::kBFloat16 && keep_sum_type) {
    compute<c10::BFloat16, float>(tensors, index, activation, result);
  } else if (type == at::kBFloat16) {
    compute<c10::BFloat16, c10::BFloat16>(tensors, index, activation, result);
  } else if (keep_sum_type) {
    compute<c10::Half, float>(tensors, index, activation, result);
  } else {
    compute<c10::Half, c10::Half>(tensors, index, activation, result);
  }
  return result;
}

namespace {

at::Tensor linear_cpu(const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                      at::TensorList w_bcast, at::TensorList index, const std::optional<at::Tensor>& bias,
                      std::string_view activation) {
  const LinearTensors tensors{x_cand, w_cand, x_bcast, w_bcast, index, bias};
  const cpu::Activation parsed = parse_activation(kLinear, activation);
  check_linear(kLinear, tensors);
  return compute_linear_cpu(kLinear, tensors, parsed, /*keep_sum_type=*/false);
}

at::Tensor linear_meta(const at::Tensor& x_cand, const at::Tensor& w_cand, at::TensorList x_bcast,
                       at::TensorList w_bcast, at::TensorList index, const std::optional<at::Tensor>& bias,
                       std::string_view activation) {
  parse_activation(kLinear, activation);
  check_linear(kLinear, {x_cand, w_cand, x_bcast, w_bcast, index, bias});
  return at::empty_symint({x_cand.sym_size(0), w_cand.sym_size(0)}, x_cand.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("linear", linear_cpu);
}
TORCH_LIBRARY_IMPL(ikbo, Meta, m) {
  m.impl("linear", linear_meta);
}

}  // namespace ikbo
