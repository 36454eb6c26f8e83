// Launches that begin while the one before them on the stream ends.
#pragma once

#include <cuda_runtime_api.h>

namespace ikbo::kernels {

// Launches a kernel that waits by hopper::grid_dependency_wait() before it touches global memory. If the launch before
// it lets it, by hopper::grid_dependency_launch(), its blocks are set up meanwhile; otherwise it begins as any other
// does. Errors are left to cudaGetLastError().
template <typename... Parameters>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t stream,
                      const Parameters&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace ikbo::kernels
