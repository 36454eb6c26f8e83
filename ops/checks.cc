#include "ops/checks.h"

#include <algorithm>

namespace ikbo {

void check_dense(std::string_view op, const at::Tensor& tensor, std::string_view name, const at::Tensor& like,
                 std::string_view like_name) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", name, " is an undefined tensor");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": ", name, " has layout ", tensor.layout(),
                   ", expected a dense (strided) tensor");
  TORCH_CHECK_TYPE(!tensor.is_quantized(), op, ": ", name, " is quantized, expected a plain dense tensor");
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": ", name, " is on ", tensor.device(), ", expected ",
                    like.device(), ", where ", like_name, " is");
}

void check_floating(std::string_view op, const at::Tensor& tensor, std::string_view name) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op,
                   ": ", name, " has dtype ", dtype, ", expected Double, Float, BFloat16 or Half");
}

void check_same_dtype(std::string_view op, const at::Tensor& tensor, std::string_view name, const at::Tensor& like,
                      std::string_view like_name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), op, ": ", name, " has dtype ", tensor.scalar_type(),
                   ", expected ", like.scalar_type(), ", the dtype of ", like_name);
}

void check_dim(std::string_view op, const at::Tensor& tensor, std::string_view name, int64_t dim,
               std::string_view shape) {
  TORCH_CHECK_VALUE(tensor.dim() == dim, op, ": ", name, " has shape ", tensor.sym_sizes(), ", expected ", shape);
}

void check_index(std::string_view op, const at::Tensor& index, std::string_view name, const at::Tensor& like,
                 std::string_view like_name) {
  check_dense(op, index, name, like, like_name);
  TORCH_CHECK_TYPE(index.scalar_type() == at::kInt, op, ": ", name, " has dtype ", index.scalar_type(),
                   ", expected Int (int32)");
  check_dim(op, index, name, 1, "(B_cand)");
}

void check_index_values(std::string_view op, const at::Tensor& index, std::string_view name, int64_t rows,
                        std::string_view rows_name) {
  const int32_t* values = index.const_data_ptr<int32_t>();
  const int64_t count = index.numel();
  // One unsigned comparison covers both ends; the largest value first, which compilers vectorise, the position only
  // where something is wrong.
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(values[i]));
  if (count == 0 || static_cast<int64_t>(largest) < std::min<int64_t>(rows, int64_t{1} << 31)) return;
  int64_t position = 0;
  while (values[position] >= 0 && values[position] < rows) ++position;
  TORCH_CHECK_INDEX(false, op, ": ", name, "[", position, "] = ", values[position], ", but ", rows_name, " has ", rows,
                    rows == 1 ? " row" : " rows");
}

std::string element_name(std::string_view name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

}  // namespace ikbo
