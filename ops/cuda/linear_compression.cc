// ikbo::linear_compression on CUDA: fp16 and bf16 through Hopper's matrix unit in one launch, the rest and what its
// copy engine cannot address through a library's product.
#include "ops/linear_compression.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "kernels/finish_sums.h"
#include "kernels/linear_compression.h"
#include "ops/cuda/call.h"
#include "ops/cuda/library_product.h"
#include "ops/cuda/measured.h"
#include "ops/linear.h"

namespace ikbo::cuda {
namespace {

constexpr const char* kCompression = "ikbo::linear_compression";

bool regular(const at::Tensor& w, const at::Tensor& e) {
  const auto plain = [](const at::Tensor& tensor, int64_t dim, int64_t least) {
    return tensor.size(dim) <= 1 || tensor.stride(dim) >= least;
  };
  return (w.size(1) <= 1 || w.stride(1) == 1) && plain(w, 0, w.size(1)) && (e.size(2) <= 1 || e.stride(2) == 1) &&
         plain(e, 1, e.size(2)) && plain(e, 0, 1);
}

bool fits_hopper_kernel(const CompressionTensors& tensors) {
  const auto type = tensors.e_cand.scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf) return false;
  if (tensors.w_bcast.size() > kernels::kMaxBroadcastTerms) return false;
  for (size_t t = 0; t < tensors.w_bcast.size(); ++t) {
    if (!regular(tensors.w_bcast[t], tensors.e_bcast[t])) return false;
  }
  return regular(tensors.w_cand, tensors.e_cand);
}

kernels::LinearCompressionTerm term_of(const at::Tensor& w, const at::Tensor& e, const int32_t* index) {
  // The stride of a dimension of one element may be anything.
  const auto stride = [](const at::Tensor& tensor, int64_t dim, int64_t dense) {
    return tensor.size(dim) <= 1 ? dense : tensor.stride(dim);
  };
  const int64_t e_row_stride = stride(e, 1, e.size(2));
  return {.w = w.const_data_ptr(),
          .w_row_stride = stride(w, 0, w.size(1)),
          .e = e.const_data_ptr(),
          .e_batch_stride = stride(e, 0, e.size(1) * e_row_stride),
          .e_row_stride = e_row_stride,
          .rows = e.size(0),
          .k = e.size(1),
          .index = index};
}

void compress_on_hopper(const CompressionTensors& tensors, at::TensorList index, const at::Tensor& out,
                        cudaStream_t stream) {
  kernels::LinearCompressionProblem problem{.batch = out.size(0),
                                            .m = out.size(1),
                                            .n = out.size(2),
                                            .type = scalar_type_of(tensors.e_cand.scalar_type()),
                                            .out_type = scalar_type_of(out.scalar_type()),
                                            .candidate = term_of(tensors.w_cand, tensors.e_cand, nullptr),
                                            .broadcast = {},
                                            .out = out.mutable_data_ptr()};
  for (size_t t = 0; t < index.size(); ++t) {
    problem.broadcast.push_back(term_of(tensors.w_bcast[t], tensors.e_bcast[t], index[t].const_data_ptr<int32_t>()));
  }
  const kernels::LinearCompressionConfig config =
      choose_config(kernels::shape_of(problem), problem.type, out.device().index()).config;
  const auto bytes = static_cast<int64_t>(kernels::linear_compression_workspace_bytes(problem, config));
  const at::Tensor workspace = at::empty({bytes}, out.options().dtype(at::kByte));
  kernels::linear_compression(problem, config, workspace.mutable_data_ptr(), static_cast<size_t>(bytes),
                              kernels::LinearCompressionStage::kFusedWs, stream);
}

void compress_generally(const CompressionTensors& tensors, at::TensorList index, const at::Tensor& out,
                        cudaStream_t stream) {
  const at::Tensor sums = stack_product(tensors.w_cand, tensors.e_cand);
  kernels::FinishSums job{.type = scalar_type_of(tensors.e_cand.scalar_type()),
                          .out_type = scalar_type_of(out.scalar_type()),
                          .candidates = out.size(0),
                          .columns = out.size(1) * out.size(2),
                          .row_stride = out.size(1) * out.size(2),
                          .sums = sums.const_data_ptr(),
                          .out = out.mutable_data_ptr()};
  std::vector<at::Tensor> kept;
  for (size_t t = 0; t < index.size(); ++t) {
    kept.push_back(stack_product(tensors.w_bcast[t], tensors.e_bcast[t]));
    job.terms.push_back({kept.back().const_data_ptr(), kept.back().size(0), index[t].const_data_ptr<int32_t>()});
  }
  kernels::finish_sums(job, stream);
}

at::Tensor linear_compression_cuda(const at::Tensor& w_cand, const at::Tensor& e_cand, at::TensorList w_bcast,
                                   at::TensorList e_bcast, at::TensorList index,
                                   std::optional<at::ScalarType> out_dtype) {
  const CompressionTensors tensors{w_cand, e_cand, w_bcast, e_bcast, index};
  check_linear_compression(kCompression, tensors);
  const at::ScalarType type = linear_compression_type(e_cand, out_dtype);
  const Call call(kCompression, e_cand);
  at::Tensor out = at::empty({e_cand.size(0), w_cand.size(0), e_cand.size(2)}, e_cand.options().dtype(type));
  if (out.numel() == 0) return out;
  std::vector<at::Tensor> dense_index;
  for (const at::Tensor& one : index) dense_index.push_back(one.contiguous());
  if (fits_hopper_kernel(tensors)) {
    compress_on_hopper(tensors, dense_index, out, call.stream());
  } else {
    compress_generally(tensors, dense_index, out, call.stream());
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear_compression", linear_compression_cuda);
}

}  // namespace ikbo::cuda
