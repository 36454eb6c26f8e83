// The warpgroups of the linear-compression kernel that multiply, and their epilogues.
#pragma once

#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/linear_compression_plan.cuh"
#include "kernels/linear_compression_tickets.cuh"

namespace ikbo::kernels {

// Where a reader of the published tiles stands.
template <typename P>
struct TileReader {
  uint32_t parity = 0;

  __device__ int next(SharedMemory<P>& shared) {
    hopper::mbarrier_wait(&shared.tile_published, parity);
    parity ^= 1;
    const int tile = *const_cast<volatile int*>(&shared.tile);
    return __shfl_sync(0xffffffff, tile, 0);
  }

  // The scheduler may publish the next one.
  __device__ void done(SharedMemory<P>& shared, uint32_t lane) {
    __syncwarp();
    if (lane == 0) {
      hopper::mbarrier_arrive_remote(&shared.tile_read, 0);
    }
  }
};

template <typename T>
__device__ inline uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// A warp's place in the pipeline, kept as addresses, so that a step of the loop has little else to do than to multiply.
template <typename P>
struct Pipeline {
  uint32_t w;  // descriptors of this stage
  uint32_t e;
  uint32_t loaded;    // barrier of this stage
  uint32_t consumed;  // barrier of this stage in the CTA that this lane releases it to
  uint32_t before;    // the same of the stage before
  uint32_t parity;
  int stage;

  static constexpr uint32_t kWStep = hopper::descriptor_offset(P::kWBytes);
  static constexpr uint32_t kEStep = hopper::descriptor_offset(P::kEBytes);

  __device__ Pipeline(SharedMemory<P>& shared, int first_stage, uint32_t first_parity, uint32_t lane)
      : w(hopper::descriptor_of(shared.w[0]) + first_stage * kWStep),
        e(hopper::descriptor_of(shared.e[0]) + first_stage * kEStep),
        loaded(hopper::shared_address(&shared.loaded[0]) + first_stage * 8),
        consumed(hopper::remote_address(&shared.consumed[0], lane < P::kCluster ? lane : 0) + first_stage * 8),
        before(0),
        parity(first_parity),
        stage(first_stage) {}

  __device__ void advance() {
    before = consumed;
    w += kWStep;
    e += kEStep;
    loaded += 8;
    consumed += 8;
    if (++stage == P::kStages) {
      stage = 0;
      parity ^= 1;
      w -= P::kStages * kWStep;
      e -= P::kStages * kEStep;
      loaded -= P::kStages * 8;
      consumed -= P::kStages * 8;
    }
  }

  // This warp has read the stage before: every CTA of the cluster may overwrite it.
  __device__ void release_previous(uint32_t lane) const {
    if (lane < P::kCluster) {
      hopper::mbarrier_arrive_at(before);
    }
  }
};

// All of K, the last step perhaps partly zeros. `next_turn` is the other warpgroup's: it starts once this one has seen all
// of its own stages loaded. Earlier it could not tell a stage's next phase from the one before the current.
template <typename P>
__device__ inline void multiply_tile(float (&first)[P::kBlockM / 2], float (&second)[P::kBlockM / 2],
                                     Pipeline<P> pipeline, int steps, uint64_t* next_turn, uint32_t lane) {
  static_assert(P::kBlocks == 2, "one accumulator a block");
  constexpr uint32_t kBlockOfE = hopper::descriptor_offset(P::kEBytes / P::kBlocks);
  const auto multiply = [&](float (&acc)[P::kBlockM / 2], uint32_t e) {
#pragma unroll
    for (int i = 0; i < kBlockK / kInstructionK; ++i) {
      hopper::Wgmma<typename P::T, P::kBlockM>::multiply(
          acc, hopper::swizzled_descriptor(e + hopper::descriptor_offset(i * kInstructionK * 128)),
          hopper::swizzled_descriptor(pipeline.w + hopper::descriptor_offset(i * kInstructionK * 2)), 1);
    }
    hopper::wgmma_commit_group();
  };
  hopper::pin_registers(first);
  hopper::pin_registers(second);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::mbarrier_wait_at(pipeline.loaded, pipeline.parity);
    hopper::wgmma_fence();
    multiply(first, pipeline.e);
    // With this step's first half queued, wait for the step before and give its stage back.
    hopper::wgmma_wait_group<1>();
    if (step > 0) {
      pipeline.release_previous(lane);
    }
    multiply(second, pipeline.e + kBlockOfE);
    pipeline.advance();
  }
  if (lane == 0) {
    hopper::mbarrier_arrive(next_turn);
  }
  __syncwarp();
  hopper::wgmma_wait_group<0>();
  hopper::pin_registers(first);
  hopper::pin_registers(second);
  if (steps > 0) {
    pipeline.release_previous(lane);
  }
}

// Where a thread's part of a unit lies: one float4 for every 8 of kBlockM.
template <typename P>
__device__ inline float4* partial_sums_of(const LinearCompressionParams& params, int64_t unit, uint32_t thread) {
  return reinterpret_cast<float4*>(params.partial_sums) + unit * (P::kVectors * kWarpgroupThreads) + thread;
}

__device__ inline void add_vector(float* acc, const float4& vector) {
  acc[0] += vector.x;
  acc[1] += vector.y;
  acc[2] += vector.z;
  acc[3] += vector.w;
}

enum NamedBarrier { kOutFreed = 1, kOutFilled = 3, kPartialSumsStored = 5 };  // each one a warpgroup

// A broadcast tile: its sums go to the workspace as they lie in the registers.
template <typename P>
__device__ inline void store_partial_sums(const LinearCompressionParams& params, const float (&acc)[P::kBlockM / 2],
                                          int64_t unit, int warpgroup, uint32_t thread) {
  float4* to = partial_sums_of<P>(params, unit, thread);
#pragma unroll
  for (int i = 0; i < P::kVectors; ++i) {
    to[i * kWarpgroupThreads] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  }
  if (params.use_flags) {
    // Every thread's writes happen before the barrier, and so before the release.
    hopper::named_barrier_sync(kPartialSumsStored + warpgroup, kWarpgroupThreads);
    if (thread == 0) {
      hopper::store_release(params.flags + unit, kFlagSet);
    }
  }
}

// Rounds acc, transposes it on the way to shared memory, and has the copy engine store (kBlockM, 64) of out. The first
// warp deals with the copy engine; the others wait for it only before they write over what it last stored.
template <typename P>
__device__ inline void store_by_copy_engine(const LinearCompressionParams& params, SharedMemory<P>& shared,
                                            const float (&acc)[P::kBlockM / 2], int candidate, int column, int m,
                                            int warpgroup, uint32_t warp, uint32_t lane) {
  using T = typename P::T;
  if (warp == 0) {
    hopper::bulk_wait_group_read<0>();
    __syncwarp();
    hopper::named_barrier_arrive(kOutFreed + warpgroup, kWarpgroupThreads);
  } else {
    hopper::named_barrier_sync(kOutFreed + warpgroup, kWarpgroupThreads);
  }
  // Lane l gives row l % 8 of 8 rows of M (the second 8 from lane 16 on) and half l / 8 of the 16 columns of its warp.
  const uint32_t row = lane % 8;
  const uint32_t segment = warp * 2 + lane / 8 % 2;
  const uint32_t to = hopper::shared_address(shared.out[warpgroup]) + row * 128 + ((segment ^ row) * 16);
#pragma unroll
  for (int i = 0; i + 1 < P::kVectors; i += 2) {
    const float* d = acc + 4 * i;
    hopper::stmatrix_x4_transposed(to + i * 1024 + lane / 16 * 1024, pack<T>(d[0], d[1]), pack<T>(d[2], d[3]),
                                   pack<T>(d[4], d[5]), pack<T>(d[6], d[7]));
  }
  if constexpr (P::kVectors % 2 == 1) {
    const float* d = acc + 4 * (P::kVectors - 1);
    hopper::stmatrix_x2_transposed(to + (P::kVectors - 1) * 1024, pack<T>(d[0], d[1]), pack<T>(d[2], d[3]));
  }
  hopper::fence_proxy_async_shared();
  if (warp == 0) {
    hopper::named_barrier_sync(kOutFilled + warpgroup, kWarpgroupThreads);
    if (lane == 0) {
      hopper::tensor_store_3d(&params.out, shared.out[warpgroup], column, m, candidate);
      hopper::bulk_commit_group();
    }
    __syncwarp();
  } else {
    hopper::named_barrier_arrive(kOutFilled + warpgroup, kWarpgroupThreads);
  }
}

// Rounds and stores element by element: fp32, or rows of out that are not aligned.
template <typename P>
__device__ inline void store_by_element(const LinearCompressionParams& params, const float (&acc)[P::kBlockM / 2],
                                        int64_t candidate, int64_t n, int64_t m) {
#pragma unroll
  for (int i = 0; i < P::kBlockM / 2; ++i) {
    const int64_t out_m = m + i / 4 * 8 + i % 2;
    const int64_t out_n = n + i / 2 % 2 * 8;
    if (out_m < params.m && out_n < params.n) {
      const int64_t offset = (candidate * params.m + out_m) * params.n + out_n;
      if (params.out_is_float32) {
        static_cast<float*>(params.out_pointer)[offset] = acc[i];
      } else {
        static_cast<typename P::T*>(params.out_pointer)[offset] = static_cast<typename P::T>(acc[i]);
      }
    }
  }
}

// One block of a tile: its sums to the workspace, or with the broadcast sums to out.
template <typename P>
__device__ inline void finish_block(const LinearCompressionParams& params, SharedMemory<P>& shared,
                                    float (&acc)[P::kBlockM / 2], const BlockWork& work, int m, int warpgroup,
                                    uint32_t thread) {
  const uint32_t warp = thread / 32;
  const uint32_t lane = thread % 32;
  if (work.kind == WorkKind::kNothing) {
    return;
  }
  if (work.kind == WorkKind::kPartialSums) {
    store_partial_sums<P>(params, acc, work.unit, warpgroup, thread);
    return;
  }
#pragma unroll 1
  for (int t = 0; t < params.broadcast_terms; ++t) {
    const int64_t unit = work.source[t];
    if (unit == kNoSource) {
#pragma unroll
      for (float& value : acc) {
        value = __int_as_float(0x7fc00000);
      }
      break;
    }
    const float4* from = partial_sums_of<P>(params, unit, thread);
    float4 window[P::kWindow];
#pragma unroll
    for (int i = 0; i < P::kVectors + P::kWindow; ++i) {
      if (i >= P::kWindow) {
        add_vector(acc + 4 * (i - P::kWindow), window[i % P::kWindow]);
      }
      if (i < P::kVectors) {
        window[i % P::kWindow] = __ldcg(from + i * kWarpgroupThreads);
      }
    }
  }
  if (params.store_by_copy_engine) {
    store_by_copy_engine<P>(params, shared, acc, work.candidate, work.column, m, warpgroup, warp, lane);
  } else {
    store_by_element<P>(params, acc, work.candidate,
                        work.column + static_cast<int>(warp) * 16 + static_cast<int>(lane) / 4,
                        m + static_cast<int>(lane) % 4 * 2);
  }
}

template <typename P>
__device__ void consume(const LinearCompressionParams& params, SharedMemory<P>& shared, int warpgroup, uint32_t lane) {
  const uint32_t thread = threadIdx.x % kWarpgroupThreads;
  for (uint32_t parity = 0;; parity ^= 1) {
    hopper::mbarrier_wait(&shared.work_ready[warpgroup], parity);
    const Work work = shared.work[warpgroup];
    const int steps = __shfl_sync(0xffffffff, work.steps, 0);  // the compiler may then take it for uniform
    if (steps == kNoWork) {
      break;
    }
    float acc[P::kBlocks][P::kBlockM / 2];
#pragma unroll
    for (int i = 0; i < P::kBlocks * P::kBlockM / 2; ++i) {
      acc[i / (P::kBlockM / 2)][i % (P::kBlockM / 2)] = 0;
    }
    // The first warpgroup starts; the turn it then waits for is the one after.
    hopper::mbarrier_wait(&shared.turn[warpgroup], warpgroup == 0 ? parity ^ 1 : parity);
    multiply_tile<P>(acc[0], acc[1], Pipeline<P>(shared, work.stage, work.parity, lane), steps,
                     &shared.turn[warpgroup ^ 1], lane);
    hopper::mbarrier_wait(&shared.sources_ready[warpgroup], parity);
#pragma unroll
    for (int i = 0; i < P::kBlocks; ++i) {
      finish_block<P>(params, shared, acc[i], shared.block[warpgroup][i], work.m, warpgroup, thread);
    }
    __syncwarp();
    if (lane == 0) {
      hopper::mbarrier_arrive(&shared.work_done[warpgroup]);
    }
  }
  if (lane == 0) {
    hopper::mbarrier_arrive_remote_release(&shared.flags_settled, 0);
  }
  if (thread < 32) {
    hopper::bulk_wait_group_read<0>();  // shared memory must outlive the stores that read it
  }
}

}  // namespace ikbo::kernels
