// Checks that the operators share. Sizes are symbolic, so one check serves real tensors and the shape rules alike; on
// tensors of unknown size it becomes a guard or a run-time assertion of the exported program.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <string_view>

// A condition on symbolic sizes that must hold; the message is only built when it does not.
#define IKBO_CHECK_SIZE(condition, ...) TORCH_CHECK_VALUE((condition).expect_true(__FILE__, __LINE__), __VA_ARGS__)

namespace ikbo {

/// Throws TypeError unless `tensor` is dense (strided), and ValueError unless it lies on the device of `like`.
void check_dense(std::string_view op, const at::Tensor& tensor, std::string_view name, const at::Tensor& like,
                 std::string_view like_name);

/// Throws TypeError unless the element type is float64, float32, bfloat16 or float16.
void check_floating(std::string_view op, const at::Tensor& tensor, std::string_view name);

/// Throws TypeError unless `tensor` has the element type of `like`.
void check_same_dtype(std::string_view op, const at::Tensor& tensor, std::string_view name, const at::Tensor& like,
                      std::string_view like_name);

/// Throws ValueError unless `tensor` has `dim` dimensions; `shape` shows the expected ones, such as "(B, K)".
void check_dim(std::string_view op, const at::Tensor& tensor, std::string_view name, int64_t dim,
               std::string_view shape);

/// Throws TypeError or ValueError unless `index` is a dense one-dimensional int32 tensor on the device of `like`.
void check_index(std::string_view op, const at::Tensor& index, std::string_view name, const at::Tensor& like,
                 std::string_view like_name);

/// Throws IndexError that names the first position of `index` whose value is outside [0, rows).
/// `index` is a contiguous int32 CPU tensor, `rows_name` the tensor whose rows it selects.
void check_index_values(std::string_view op, const at::Tensor& index, std::string_view name, int64_t rows,
                        std::string_view rows_name);

/// "name[i]", for elements of list arguments.
std::string element_name(std::string_view name, size_t i);

}  // namespace ikbo
