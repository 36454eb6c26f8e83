// Tensor maps: what the copy engine knows of a tensor, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ikbo::hopper {

// A map of 16-bit elements, sizes and box innermost first, strides in elements of the dimensions after the first (each
// a multiple of 8). Boxes have rows of 128 bytes, 128-byte swizzled; what lies outside is read as zero and not written.
// Throws std::runtime_error, which begins with `name`.
inline CUtensorMap tensor_map_16_bit(const void* pointer, bool is_fp16, const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& strides, const std::vector<int>& box,
                                     const char* name) {
  static const auto encode = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  std::vector<cuuint64_t> map_sizes(sizes.begin(), sizes.end());
  std::vector<cuuint32_t> map_box(box.begin(), box.end());
  std::vector<cuuint64_t> byte_strides;
  for (const int64_t stride : strides) byte_strides.push_back(static_cast<cuuint64_t>(stride) * 2);
  const std::vector<cuuint32_t> element_strides(sizes.size(), 1);
  CUtensorMap map{};
  const auto make = [&] {
    return encode(&map, is_fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(pointer), map_sizes.data(),
                  byte_strides.data(), map_box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not called the runtime for anything that needs a context has none for the driver.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) result = make();
  }
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaFree(nullptr) == cudaSuccess) result = make();
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(name) + ": no tensor map, driver error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace ikbo::hopper
