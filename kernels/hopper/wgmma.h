// The warpgroup matrix multiply, one function an instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/hopper/mbarrier.h"

namespace ikbo::hopper {

// Orders accesses to accumulator registers and shared memory before the multiplies that follow.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int PENDING>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this line.
template <int COUNT>
__device__ inline void pin_registers(float (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

// An operand tile in shared memory whose rows are 128 bytes, 128-byte swizzled, eight rows of 1024 bytes to an atom
// that lies on a multiple of 1024. It serves a K-major operand (rows along M or N, 64 elements of K in a row) and an
// MN-major one of 64 elements (rows along K): in both, atoms follow each other along the rows, 1024 bytes apart.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
//
// Only the lower half of a descriptor says where the tile is, so that is all that callers keep and add to.
__device__ inline uint32_t descriptor_of(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4;
}

// What to add to move the start by `bytes`.
__host__ __device__ constexpr uint32_t descriptor_offset(uint32_t bytes) {
  return bytes >> 4;
}

__device__ inline uint64_t swizzled_descriptor(uint32_t low) {
  constexpr uint64_t kStrideBytes = 1024;  // from one atom to the next along the rows
  constexpr uint64_t kSwizzle128 = 1;
  constexpr uint64_t kHigh = kStrideBytes >> 4 | kSwizzle128 << 30;
  return kHigh << 32 | low;
}

// d (64, N) {+}= a (64, 16) b (16, N) over one warpgroup: a MN-major, b K-major, both in shared memory, sums in fp32.
// Thread t of the warpgroup, with warp = t / 32 and lane = t % 32, holds in d[4 j + 2 h + c] the element of
// row 16 warp + 8 h + lane / 4 and column 8 j + 2 (lane % 4) + c.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
template <typename T, int N>
struct Wgmma;

// The same with both operands K-major.
template <typename T, int N>
struct WgmmaKMajor;

// The same with a in registers and b MN-major: a[0] and a[1] hold, of the thread's rows (lane / 4 and 8 below), columns
// 2 (lane % 4) and the next, a[2] and a[3] those 8 further right: what a thread has of a result, once it is narrowed.
template <typename T, int N>
struct WgmmaRegisters;

#include "kernels/hopper/wgmma_k_major.inc"
#include "kernels/hopper/wgmma_registers.inc"
#include "kernels/hopper/wgmma_shapes.inc"

// An MN-major tile of more than 64 elements: panels of 64, `panel_bytes` apart.
__device__ inline uint32_t panelled_descriptor_of(const void* tile, uint32_t panel_bytes) {
  return descriptor_of(tile) | (panel_bytes >> 4) << 16;
}

}  // namespace ikbo::hopper
