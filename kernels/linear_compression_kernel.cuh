// The linear-compression kernel: persistent, one warpgroup that loads and two that multiply, a tile each in turn: while
// one rounds and stores, the tensor cores work for the other.
//
// Everything is computed transposed: out[b]^T (N, M) = E[b]^T (N, K) W^T (K, M), so that M lies along the N of the
// matrix instruction, which any multiple of 8 up to 256 will do for. E needs no transposition in memory for that: the
// instruction takes an MN-major first operand.
#pragma once

#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/linear_compression_consumer.cuh"
#include "kernels/linear_compression_launch.h"
#include "kernels/linear_compression_loaders.cuh"
#include "kernels/linear_compression_params.h"
#include "kernels/linear_compression_plan.cuh"
#include "kernels/linear_compression_tickets.cuh"

namespace ikbo::kernels {

// Deals tiles to the cluster: a warp of its first CTA.
template <typename P>
__device__ void schedule(const LinearCompressionParams& params, SharedMemory<P>& shared, uint32_t first_ticket,
                         uint32_t lane) {
  if (lane == 0) {
    uint32_t parity = 0;
    const auto publish = [&](int tile) {
#pragma unroll
      for (int rank = 0; rank < P::kCluster; ++rank) {
        hopper::store_async(&shared.tile, &shared.tile_published, rank, tile);
      }
      hopper::mbarrier_wait(&shared.tile_read, parity);
      parity ^= 1;
    };
    const uint32_t tickets = params.tile_end - params.tile_begin;
    for (uint32_t ticket = first_ticket; ticket < tickets; ticket = draw_ticket(params.tickets)) {
      publish(params.tile_begin + static_cast<int>(ticket));
    }
    publish(kNoTile);
    hopper::mbarrier_wait_cluster(&shared.flags_settled, 0);
  }
  __syncwarp();
  leave_and_reset(params, lane);
}

// Works out what the warpgroups do with each tile, and waits until the broadcast sums that they add are in memory, so
// that the warpgroups that multiply need not.
template <typename P>
__device__ void plan_work(const LinearCompressionParams& params, SharedMemory<P>& shared, uint32_t rank,
                          uint32_t lane) {
  const int i = static_cast<int>(lane) / kMaxBroadcastTerms;  // block of this lane
  const int broadcast = static_cast<int>(lane) % kMaxBroadcastTerms;
  const bool plans = i < P::kBlocks;
  Ring<P::kWarpgroups> turn;
  turn.parity = 1;        // nobody has work at first
  uint32_t position = 0;  // steps so far
  int ended = 0;
  int unfinished_broadcasts = 0;  // tiles until no broadcast tile can be unfinished any more
  bool settled = false;
  // Nothing of this CTA sets or awaits flags any more. Said as early as it is known, so that clearing the flags mostly
  // costs no time of its own.
  const auto settle = [&] {
    if (lane == 0) {
      hopper::mbarrier_arrive_remote_release(&shared.flags_settled, 0);
    }
    settled = true;
  };
  TileReader<P> tiles;
  int index = 0;
  for (;; turn.advance()) {
    if (index != kNoTile) {
      if (lane == 0) {
        hopper::mbarrier_arrive_expect_bytes(&shared.tile_published, sizeof(shared.tile));
      }
      index = tiles.next(shared);
      tiles.done(shared, lane);
      if (index == kNoTile && unfinished_broadcasts == 0) {
        settle();
      }
    }
    hopper::mbarrier_wait(&shared.work_done[turn.stage], turn.parity);
    const Tile tile = decode_tile<P>(params, index == kNoTile ? params.tile_begin : index, rank);
    const LinearCompressionTermParams& term = params.terms[tile.term];
    const bool is_candidate = tile.term == params.broadcast_terms;
    const BlockPlace place = locate_block(params, is_candidate, tile.first_block + i);
    const bool exists = i < tile.blocks && place.row < term.rows;
    const auto unit_of = [&](const LinearCompressionTermParams& of, int row) {
      return of.unit_begin + (static_cast<int64_t>(row) * params.column_blocks + place.column_block) * params.m_tiles +
             tile.m_tile;
    };
    if (lane == 0) {
      shared.work[turn.stage] = {index == kNoTile ? kNoWork : term.steps, static_cast<int>(position % P::kStages),
                                 position / P::kStages % 2, tile.m_tile * P::kBlockM};
    }
    position += term.steps;
    unfinished_broadcasts = !is_candidate ? P::kWarpgroups : max(unfinished_broadcasts - 1, 0);
    BlockWork& work = shared.block[turn.stage][plans ? i : 0];
    if (plans && broadcast == 0) {
      work.kind = !exists ? WorkKind::kNothing : is_candidate ? WorkKind::kCandidate : WorkKind::kPartialSums;
      work.candidate = place.row;
      work.column = place.column_block * kBlockColumns;
      work.unit = unit_of(term, place.row);
    }
    hopper::mbarrier_arrive(&shared.work_ready[turn.stage]);
    if (index == kNoTile) {
      if (++ended == P::kWarpgroups) {
        break;
      }
      continue;
    }
    int64_t unit = kNoSource;
    if (plans && is_candidate && broadcast < params.broadcast_terms && exists) {
      const LinearCompressionTermParams& from = params.terms[broadcast];
      const int source_row = from.index[place.row];
      if (source_row >= 0 && source_row < from.rows) {
        unit = unit_of(from, source_row);
        if (params.use_flags) {
          await_flag(params.flags + unit);
        }
      }
    }
    if (plans) {
      work.source[broadcast] = unit;
    }
    hopper::mbarrier_arrive(&shared.sources_ready[turn.stage]);
  }
  if (!settled) {
    settle();
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1)
    linear_compression_kernel(const __grid_constant__ LinearCompressionParams params) {
  using Shared = SharedMemory<P>;
  static_assert(sizeof(Shared) <= kSharedBytes, "more shared memory than a CTA can have");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32_t rank = P::kCluster == 1 ? 0 : hopper::cluster_cta_rank();
  const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;

  uint32_t first_ticket = 0;
  if (warp == kSchedulerWarp && rank == 0 && lane == 0) {
    hopper::grid_dependency_wait();
    first_ticket = draw_ticket(params.tickets);
  }
  if (warp == kSetUpWarp && lane == 0) {
    for (int stage = 0; stage < P::kStages; ++stage) {
      hopper::mbarrier_init(&shared.loaded[stage], 1);
      hopper::mbarrier_init(&shared.consumed[stage], P::kCluster * P::kWarpgroupWarps);
    }
    hopper::mbarrier_init(&shared.tile_published, 1);
    hopper::mbarrier_init(&shared.tile_read, P::kCluster * 2);
    for (int warpgroup = 0; warpgroup < P::kWarpgroups; ++warpgroup) {
      hopper::mbarrier_init(&shared.turn[warpgroup], P::kWarpgroupWarps);
      // Every thread comes to these three itself. One lane a warp behind __syncwarp would do as well, and costs no less
      // a tile, but compute-sanitizer's racecheck does not follow it.
      hopper::mbarrier_init(&shared.work_ready[warpgroup], 32);
      hopper::mbarrier_init(&shared.sources_ready[warpgroup], 32);
      hopper::mbarrier_init(&shared.work_done[warpgroup], kWarpgroupThreads);
    }
    hopper::mbarrier_init(&shared.flags_settled, P::kCluster);
    hopper::fence_mbarrier_init();
  }
  if (warp == kLoadWarp && lane <= params.broadcast_terms && params.terms[lane].has_maps) {
    hopper::prefetch_tensor_map(&params.w[lane]);
    hopper::prefetch_tensor_map(&params.e[lane]);
  }
  __syncwarp();
  // What is above may run while the launch before this one, which may share the workspace, ends.
  hopper::grid_dependency_wait();
  hopper::grid_dependency_launch();
  if constexpr (P::kCluster == 1) {
    __syncthreads();
  } else {
    hopper::cluster_arrive();
    hopper::cluster_wait();
  }

  if (threadIdx.x < kWarpgroupThreads) {
    hopper::register_decrease<P::kProducerRegisters>();
    if (warp == kLoadWarp) {
      load_tiles<P>(params, shared, rank, lane);
    } else if (warp == kSchedulerWarp && rank == 0) {
      schedule<P>(params, shared, first_ticket, lane);
    } else if (warp == kPlannerWarp) {
      plan_work<P>(params, shared, rank, lane);
    }
  } else {
    hopper::register_increase<P::kConsumerRegisters>();
    consume<P>(params, shared, warp / 4 - 1, lane);
  }
  __syncwarp();
  if constexpr (P::kCluster > 1) {
    // A CTA stays until no other one of its cluster can still write to it.
    hopper::cluster_arrive();
    hopper::cluster_wait();
  }
}

template <typename P>
cudaError_t launch(const LinearCompressionParams& params, int ctas, cudaStream_t stream) {
  const auto kernel = linear_compression_kernel<P>;
  constexpr int kBytes = sizeof(SharedMemory<P>);
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {P::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T, int BLOCK_M>
cudaError_t launch_clustered(const LinearCompressionParams& params, const LinearCompressionConfig& config,
                             cudaStream_t stream) {
  return config.cluster == 2 ? launch<Plan<T, BLOCK_M, 2>>(params, config.ctas, stream)
                             : launch<Plan<T, BLOCK_M, 1>>(params, config.ctas, stream);
}

}  // namespace ikbo::kernels
