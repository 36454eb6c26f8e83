// Tensors whose rows can be read 16 bytes at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <vector>

namespace ikbo::cuda {

/// The tensors, each of 2 to 4 dimensions and a type of 2, 4 or 8 bytes; those among them that need it copied, in one
/// launch on `stream`: so that rows are dense, begin at addresses that are multiples of 16 bytes, and lie a multiple of
/// them, at least their own length, apart, with memory up to that multiple behind the last. The tensors returned have
/// the sizes of those given.
std::vector<at::Tensor> with_aligned_rows(std::vector<at::Tensor> tensors, cudaStream_t stream);

/// The same for matrices, made larger by zeros until the length of a row is a multiple of 16 bytes and, for weights,
/// (features, K), the number of rows is as many elements' multiple: a library has fast kernels for such sizes alone.
struct Matrix {
  at::Tensor tensor;
  bool is_weight = false;
};
std::vector<at::Tensor> enlarged(const std::vector<Matrix>& matrices, cudaStream_t stream);

}  // namespace ikbo::cuda
