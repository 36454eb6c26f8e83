#include "ops/cuda/aligned_rows.h"

#include <ATen/ops/empty.h>

#include "kernels/align_rows.h"

namespace ikbo::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // bytes

int64_t elements_aligned(const at::Tensor& tensor) {
  return kAlignment / static_cast<int64_t>(tensor.element_size());
}

int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

bool aligned(const at::Tensor& tensor) {
  const int64_t columns = tensor.size(-1);
  if ((columns > 1 && tensor.stride(-1) != 1) ||
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment != 0) {
    return false;
  }
  int64_t end = tensor.storage_offset() + round_up(columns, elements_aligned(tensor));  // of the last row
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
    // Whoever takes the stride of a dimension of one element for real still gets a legal one.
    if (tensor.stride(d) < columns || tensor.stride(d) % elements_aligned(tensor) != 0) return false;
    end += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return end * static_cast<int64_t>(tensor.element_size()) <= static_cast<int64_t>(tensor.storage().nbytes());
}

// Copies that one launch makes.
class Copies {
 public:
  // A tensor of the sizes given, rows enlarged to a multiple of 16 bytes; of two dimensions, `rows` of them.
  at::Tensor add(const at::Tensor& tensor, int64_t rows) {
    sources_.push_back(tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor);
    const at::Tensor& source = sources_.back();
    std::vector<int64_t> sizes = source.sizes().vec();
    sizes.back() = round_up(sizes.back(), elements_aligned(source));
    if (sizes.size() == 2) sizes.front() = rows;
    at::Tensor copy = at::empty(sizes, source.options().memory_format(at::MemoryFormat::Contiguous));
    kernels::AlignRows job{.from = source.const_data_ptr(),
                           .element_bytes = static_cast<int>(source.element_size()),
                           .columns = source.size(-1),
                           .to = copy.mutable_data_ptr(),
                           .to_rows = copy.numel() / sizes.back(),
                           .to_columns = sizes.back()};
    const auto leading = static_cast<size_t>(source.dim() - 1);
    for (size_t d = 0; d < leading; ++d) {
      job.sizes[3 - leading + d] = source.size(static_cast<int64_t>(d));
      job.strides[3 - leading + d] = source.stride(static_cast<int64_t>(d));
    }
    jobs_.push_back(job);
    return copy;
  }

  void start(cudaStream_t stream) const { kernels::align_rows(jobs_, stream); }

 private:
  std::vector<kernels::AlignRows> jobs_;
  std::vector<at::Tensor> sources_;
};

}  // namespace

std::vector<at::Tensor> with_aligned_rows(std::vector<at::Tensor> tensors, cudaStream_t stream) {
  Copies copies;
  for (at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || aligned(tensor)) continue;
    tensor = copies.add(tensor, tensor.size(0)).narrow(-1, 0, tensor.size(-1));
  }
  copies.start(stream);
  return tensors;
}

std::vector<at::Tensor> enlarged(const std::vector<Matrix>& matrices, cudaStream_t stream) {
  Copies copies;
  std::vector<at::Tensor> result;
  for (const auto& [tensor, is_weight] : matrices) {
    const int64_t multiple = elements_aligned(tensor);
    const int64_t rows = is_weight ? round_up(tensor.size(0), multiple) : tensor.size(0);
    const bool fits = tensor.size(1) % multiple == 0 && rows == tensor.size(0) && aligned(tensor);
    if (tensor.numel() == 0) {
      result.push_back(is_weight ? at::empty({rows, tensor.size(1)}, tensor.options()) : tensor);
    } else {
      result.push_back(fits ? tensor : copies.add(tensor, rows));
    }
  }
  copies.start(stream);
  return result;
}

}  // namespace ikbo::cuda
