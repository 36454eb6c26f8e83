// Copies of 16 bytes from global to shared memory that the thread does not wait for, one function an instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-non-bulk-copy
#pragma once

#include <cstdint>

namespace ikbo::hopper {

// Reads `bytes` of them (0 to 16) and fills up with zeros.
__device__ inline void cp_async_16(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ inline void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ikbo::hopper
