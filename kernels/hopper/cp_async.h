// Copies from global to shared memory that the thread does not wait for, one function an instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-non-bulk-copy
#pragma once

#include <cstdint>

namespace ikbo::hopper {

// Reads `bytes` of 16 (0 to 16) and fills up with zeros.
__device__ inline void cp_async_16(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// Reads 4 bytes, or none: then the destination gets zeros.
__device__ inline void cp_async_4_or_zeros(uint32_t destination, uintptr_t source, bool reads) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.eq.u32 ignore, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 4, ignore;\n"
      "}\n" ::"r"(destination),
      "l"(source), "r"(static_cast<uint32_t>(reads))
      : "memory");
}

__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most `PENDING` of the thread's groups are not there yet.
template <int PENDING>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ikbo::hopper
