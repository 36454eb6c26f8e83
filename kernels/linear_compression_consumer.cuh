// The warpgroups of the linear-compression kernel that multiply, and their epilogues.
#pragma once

#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/linear_compression_plan.cuh"
#include "kernels/linear_compression_tickets.cuh"
#include "kernels/unaligned_rows.cuh"

namespace ikbo::kernels {

// Where a reader of the published tiles stands.
template <typename P>
struct TileReader {
  uint32_t parity = 0;

  __device__ int next(SharedMemory<P>& shared) {
    hopper::mbarrier_wait(&shared.tile_published, parity);
    parity ^= 1;
    // By the lane that then says so in `done`.
    const int tile = threadIdx.x % 32 == 0 ? *const_cast<volatile int*>(&shared.tile) : 0;
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

// All of K, the last step perhaps partly zeros. `next_turn` is the other warpgroup's: it starts once this one has seen
// all of its own stages loaded. Earlier it could not tell a stage's next phase from the one before the current.
template <typename P>
__device__ inline void multiply_tile(float (&first)[P::kBlockM / 2], float (&second)[P::kBlockM / 2],
                                     Pipeline<P> pipeline, int steps, uint64_t* next_turn, uint32_t lane) {
  static_assert(P::kBlocks == 2, "one accumulator a block");
  constexpr uint32_t kBlockOfE = hopper::descriptor_offset(P::kEBytes / P::kBlocks);
  const auto multiply = [&](float(&acc)[P::kBlockM / 2], uint32_t e) {
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

// Out of 16 bits leaves by way of shared memory, (kBlockM, 64) at a time. The first warp of a warpgroup deals with the
// copy engine; the others wait for it only before they write over what it last stored. Rows that are not aligned are
// written by all four warps.
//
// First half: rounds acc and transposes it on the way to shared memory.
template <typename P>
__device__ inline void stage_out(SharedMemory<P>& shared, const float (&acc)[P::kBlockM / 2], bool by_copy_engine,
                                 int warpgroup, uint32_t warp, uint32_t lane) {
  using T = typename P::T;
  if (warp == 0 && by_copy_engine) {
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
}

// Second half: the copy engine takes it from there.
template <typename P>
__device__ inline void send_out(const LinearCompressionParams& params, SharedMemory<P>& shared, const BlockWork& work,
                                int m, int warpgroup, uint32_t warp, uint32_t lane) {
  hopper::fence_proxy_async_shared();
  if (warp == 0) {
    hopper::named_barrier_sync(kOutFilled + warpgroup, kWarpgroupThreads);
    if (lane == 0) {
      hopper::tensor_store_3d(&params.out, shared.out[warpgroup], work.column, m, work.candidate);
      hopper::bulk_commit_group();
    }
    __syncwarp();
  } else {
    hopper::named_barrier_arrive(kOutFilled + warpgroup, kWarpgroupThreads);
  }
}

// Or the warps themselves do, where rows are not aligned.
template <typename P>
__device__ inline void write_out(const LinearCompressionParams& params, SharedMemory<P>& shared, const BlockWork& work,
                                 int m, int warpgroup, uint32_t thread) {
  hopper::named_barrier_sync(kOutFilled + warpgroup, kWarpgroupThreads);
  const int rows = static_cast<int>(min(params.m - m, static_cast<int64_t>(P::kBlockM)));
  auto* const to =
      static_cast<uint16_t*>(params.out_pointer) + (work.candidate * params.m + m) * params.n + work.column;
  PanelRows(hopper::shared_address(shared.out[warpgroup]), to, params.n, static_cast<int>(params.n) - work.column,
            thread)
      .write(rows);
}

// fp32, straight from the registers: 32 bytes of each of four rows at a time.
template <typename P>
__device__ inline void store_fp32(const LinearCompressionParams& params, const float (&acc)[P::kBlockM / 2],
                                  int64_t candidate, int64_t n, int64_t m) {
#pragma unroll
  for (int i = 0; i < P::kBlockM / 2; ++i) {
    const int64_t out_m = m + i / 4 * 8 + i % 2;
    const int64_t out_n = n + i / 2 % 2 * 8;
    if (out_m < params.m && out_n < params.n) {
      static_cast<float*>(params.out_pointer)[(candidate * params.m + out_m) * params.n + out_n] = acc[i];
    }
  }
}

// The first WINDOW vectors of a unit are on their way; adds all of it, fetching the others as these come.
template <typename P, int WINDOW>
__device__ inline void fetch_sums(float4 (&window)[WINDOW], const float4* from) {
#pragma unroll
  for (int i = 0; i < WINDOW; ++i) {
    window[i] = __ldcg(from + i * kWarpgroupThreads);
  }
}
template <typename P, int WINDOW>
__device__ inline void add_sums(float (&acc)[P::kBlockM / 2], float4 (&window)[WINDOW], const float4* from) {
#pragma unroll
  for (int i = 0; i < P::kVectors; ++i) {
    add_vector(acc + 4 * i, window[i % WINDOW]);
    if (i + WINDOW < P::kVectors) {
      window[i % WINDOW] = __ldcg(from + (i + WINDOW) * kWarpgroupThreads);
    }
  }
}

// The same to both blocks.
template <typename P, int WINDOW>
__device__ inline void add_sums(float (&first)[P::kBlockM / 2], float (&second)[P::kBlockM / 2],
                                float4 (&window)[WINDOW], const float4* from) {
#pragma unroll
  for (int i = 0; i < P::kVectors; ++i) {
    add_vector(first + 4 * i, window[i % WINDOW]);
    add_vector(second + 4 * i, window[i % WINDOW]);
    if (i + WINDOW < P::kVectors) {
      window[i % WINDOW] = __ldcg(from + (i + WINDOW) * kWarpgroupThreads);
    }
  }
}

// The broadcast terms after the first, of which there are mostly none. A wrong index makes NaN of all.
template <typename P>
__device__ inline void add_further_terms(const LinearCompressionParams& params, float (&acc)[P::kBlockM / 2],
                                         const BlockWork& work, uint32_t thread) {
  bool missing = params.broadcast_terms > 0 && work.source[0] == kNoSource;
#pragma unroll 1
  for (int t = 1; t < params.broadcast_terms; ++t) {
    const int64_t unit = work.source[t];
    missing |= unit == kNoSource;
    const float4* from = partial_sums_of<P>(params, unit == kNoSource ? 0 : unit, thread);
    float4 window[P::kWindow];
    fetch_sums<P>(window, from);
    add_sums<P>(acc, window, from);
  }
  if (missing) {
#pragma unroll
    for (float& value : acc) {
      value = __int_as_float(0x7fc00000);
    }
  }
}

// The unit of the first term, or some unit in place of a missing one, which add_further_terms makes good for.
template <typename P>
__device__ inline const float4* first_sums(const LinearCompressionParams& params, const BlockWork& work,
                                           uint32_t thread) {
  return partial_sums_of<P>(
      params, work.kind != WorkKind::kCandidate || work.source[0] == kNoSource ? 0 : work.source[0], thread);
}

// Both blocks of a tile: their sums to the workspace, or with the broadcast sums to out. Two candidates of one user
// take the same broadcast sums; otherwise the second's are on their way as soon as the first block has left the
// registers.
template <typename P>
__device__ inline void finish_tile(const LinearCompressionParams& params, SharedMemory<P>& shared,
                                   float (&first)[P::kBlockM / 2], float (&second)[P::kBlockM / 2], int m,
                                   int warpgroup, uint32_t thread) {
  const uint32_t warp = thread / 32;
  const uint32_t lane = thread % 32;
  const BlockWork& first_work = shared.block[warpgroup][0];
  const BlockWork& second_work = shared.block[warpgroup][1];
  // The second block is of the same kind or none.
  if (first_work.kind == WorkKind::kNothing) {
    return;
  }
  const bool has_second = second_work.kind != WorkKind::kNothing;
  if (first_work.kind == WorkKind::kPartialSums) {
    store_partial_sums<P>(params, first, first_work.unit, warpgroup, thread);
    if (has_second) {
      store_partial_sums<P>(params, second, second_work.unit, warpgroup, thread);
    }
    return;
  }
  const bool adds = params.broadcast_terms > 0;
  const bool same = has_second && first_work.source[0] == second_work.source[0];
  {
    const float4* from = first_sums<P>(params, first_work, thread);
    float4 window[P::kWindow];
    fetch_sums<P>(window, from);
    if (adds && same) {
      add_sums<P>(first, second, window, from);
    } else if (adds) {
      add_sums<P>(first, window, from);
    }
    add_further_terms<P>(params, first, first_work, thread);
  }
  const int n = static_cast<int>(warp) * 16 + static_cast<int>(lane) / 4;
  if (params.out_is_float32) {
    store_fp32<P>(params, first, first_work.candidate, first_work.column + n, m + static_cast<int>(lane) % 4 * 2);
  } else {
    stage_out<P>(shared, first, params.store_by_copy_engine, warpgroup, warp, lane);
  }
  // Written by the warps, the first block leaves before anything of the second is fetched: there are no registers for
  // both at a time.
  const bool by_warps = !params.out_is_float32 && !params.store_by_copy_engine;
  const auto send_first = [&] {
    if (params.store_by_copy_engine) {
      send_out<P>(params, shared, first_work, m, warpgroup, warp, lane);
    }
  };
  if (by_warps) {
    write_out<P>(params, shared, first_work, m, warpgroup, thread);
  }
  if (same) {
    send_first();
  } else {
    const float4* from = first_sums<P>(params, second_work, thread);
    float4 window[P::kVectors];
    fetch_sums<P>(window, from);
    send_first();
    if (!has_second) {
      return;
    }
    if (adds) {
      add_sums<P>(second, window, from);
    }
  }
  add_further_terms<P>(params, second, second_work, thread);
  if (params.out_is_float32) {
    store_fp32<P>(params, second, second_work.candidate, second_work.column + n, m + static_cast<int>(lane) % 4 * 2);
  } else {
    stage_out<P>(shared, second, params.store_by_copy_engine, warpgroup, warp, lane);
    if (by_warps) {
      write_out<P>(params, shared, second_work, m, warpgroup, thread);
    } else {
      send_out<P>(params, shared, second_work, m, warpgroup, warp, lane);
    }
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
    finish_tile<P>(params, shared, acc[0], acc[1], work.m, warpgroup, thread);
    hopper::mbarrier_arrive(&shared.work_done[warpgroup]);
  }
  if (thread < 32) {
    hopper::bulk_wait_group_read<0>();  // shared memory must outlive the stores that read it
  }
}

}  // namespace ikbo::kernels
