// ikbo::aligned_cat on CUDA: every piece's rows written where they belong, 16 bytes at a time.
#include "ops/aligned_cat.h"

#include <torch/library.h>

#include <vector>

#include "kernels/align_rows.h"
#include "ops/cuda/call.h"

namespace ikbo::cuda {
namespace {

constexpr const char* kAlignedCat = "ikbo::aligned_cat";

int64_t product(at::IntArrayRef sizes) {
  int64_t all = 1;
  for (const int64_t size : sizes) all *= size;
  return all;
}

at::Tensor aligned_cat_cuda(at::TensorList tensors, int64_t dim) {
  const auto [out, along] = empty_aligned_cat(tensors, dim);
  const auto item = static_cast<int64_t>(out.element_size());
  if (out.numel() == 0) return out;
  if (item != 2 && item != 4 && item != 8) {
    for (int64_t i = 0, from = 0; i < static_cast<int64_t>(tensors.size()); ++i) {
      const at::Tensor& piece = tensors[static_cast<size_t>(i)];
      out.narrow(along, from, piece.size(along)).copy_(piece);
      from += piece.size(along);
    }
    return out;
  }
  const Call call(kAlignedCat, out);
  const int64_t rank = out.dim();
  const int64_t columns = out.size(-1);
  const int64_t to_columns = (columns * item + 15) / 16 * 16 / item;
  const int64_t before = product(out.sizes().slice(0, static_cast<size_t>(along)));
  const int64_t behind =
      product(out.sizes().slice(static_cast<size_t>(along) + 1, static_cast<size_t>(rank - along - 2)));
  std::vector<at::Tensor> kept;
  std::vector<kernels::AlignRows> jobs;
  int64_t from = 0;  // rows of one entry of the dimensions in front
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const int64_t rows = tensor.size(along) * behind;
    const bool as_it_is = rank == 3 && along == 1 && (columns == 1 || tensor.stride(2) == 1);
    kept.push_back(as_it_is ? tensor : tensor.contiguous().view({before, rows, columns}));
    const at::Tensor& piece = kept.back();
    jobs.push_back({.from = piece.const_data_ptr(),
                    .element_bytes = static_cast<int>(item),
                    .sizes = {1, before, rows},
                    .strides = {0, piece.stride(0), piece.stride(1)},
                    .columns = columns,
                    .to = static_cast<char*>(out.mutable_data_ptr()) + from * to_columns * item,
                    .to_rows = before * rows,
                    .to_columns = to_columns,
                    .to_outer_rows = out.size(along) * behind});
    from += rows;
  }
  kernels::align_rows(jobs, call.stream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("aligned_cat", aligned_cat_cuda);
}

}  // namespace ikbo::cuda
