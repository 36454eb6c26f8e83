// Clusters, named barriers, register reallocation, flags in global memory: one function an instruction.
#pragma once

#include <cstdint>

#include "kernels/hopper/mbarrier.h"

namespace ikbo::hopper {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-cluster-ctarank
__device__ inline uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-nclusterid
__device__ inline uint32_t cluster_count() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier among `threads` threads of the CTA; 0 is __syncthreads().
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar-barrier
__device__ inline void named_barrier_sync(uint32_t name, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Counts as having come to the barrier without waiting for the others.
__device__ inline void named_barrier_arrive(uint32_t name, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Waits until the launch before this one, which let it begin early, is over and what it wrote is visible.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ inline void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next launch begin, if it was made to wait for that and no more.
__device__ inline void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int REGISTERS>
__device__ inline void register_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void register_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ inline uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t load_relaxed(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
__device__ inline void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
__device__ inline uint64_t add_acquire_release(uint64_t* address, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}
__device__ inline uint64_t add_relaxed(uint64_t* address, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}
__device__ inline uint64_t compare_and_swap(uint64_t* address, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

// Writes to the same place in another CTA of the cluster (or in this one), and completes 4 bytes on the barrier there.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
__device__ inline void store_async(int* address, uint64_t* barrier, uint32_t cta_rank, int value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   remote_address(address, cta_rank)),
               "r"(value), "r"(remote_address(barrier, cta_rank))
               : "memory");
}

// Two 8x8 matrices of 16-bit elements, transposed on the way: lanes 8 i to 8 i + 7 give the addresses of the 16-byte
// rows of matrix i. https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ inline void stmatrix_x2_transposed(uint32_t address, uint32_t matrix0, uint32_t matrix1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(matrix0),
               "r"(matrix1)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements, transposed on the way: lanes 8 i to 8 i + 7 give the addresses of the 16-byte
// rows of matrix i.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ inline void stmatrix_x4_transposed(uint32_t address, uint32_t matrix0, uint32_t matrix1, uint32_t matrix2,
                                              uint32_t matrix3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrix0),
               "r"(matrix1), "r"(matrix2), "r"(matrix3)
               : "memory");
}

}  // namespace ikbo::hopper
