// Launches that may begin while the one before them on the stream ends.
#pragma once

#include <cuda_runtime_api.h>

namespace ikbo::hopper {

// If the launch before lets it (grid_dependency_launch), `kernel` begins early; it must not touch global memory before
// grid_dependency_wait. Else it begins as any other does.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
template <typename Params>
cudaError_t launch_early(void (*kernel)(Params), dim3 ctas, dim3 threads, size_t shared_bytes, cudaStream_t stream,
                         const Params& params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace ikbo::hopper
