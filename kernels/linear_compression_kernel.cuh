// The linear-compression kernel: persistent, one warpgroup that loads and two that multiply.
//
// Everything is computed transposed: out[b]^T (N, M) = E[b]^T (N, K) W^T (K, M), so that M lies along the N of the matrix
// instruction, which any multiple of 8 up to 256 will do for. E needs no transposition in memory for that: the
// instruction takes an MN-major first operand.
#pragma once

#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/linear_compression_launch.h"
#include "kernels/linear_compression_params.h"
#include "kernels/linear_compression_tickets.cuh"

namespace ikbo::kernels {

using namespace ikbo::hopper;

constexpr int kBlockK = 64;         // 128 bytes: one row of the 128-byte swizzle
constexpr int kInstructionK = 16;   // of one matrix instruction
constexpr int kWarpgroups = 2;      // that multiply
constexpr int kWarpgroupThreads = 128;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = (1 + kWarpgroups) * kWarpgroupThreads;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kPrefetchVectorsAtMost = 18;
constexpr int kSharedBytes = 232448;  // what a CTA can have on sm_90
constexpr int kFirstNamedBarrier = 1;

// Who shares what in a cluster: SHARE_W CTAs with other columns have the same tile of W, SHARE_E CTAs with other rows of M
// have the same tiles of E. Each loads its part of what it shares, for all.
template <int SHARE_W_, int SHARE_E_>
struct Sharing {
  static constexpr int kW = SHARE_W_;
  static constexpr int kE = SHARE_E_;
  static constexpr int kCtas = kW * kE;
  static constexpr int kBlocks = kWarpgroups * kW;  // of 64 columns, a cluster
  static_assert(kE == 1 || kE == kWarpgroups, "shared E is loaded by one CTA a warpgroup");
  // CTAs that write to another's stage, itself included.
  static constexpr int kWriters = kW + kE - 1;

  uint32_t rank;
  __device__ int column() const { return static_cast<int>(rank) % kW; }
  __device__ int row() const { return static_cast<int>(rank) / kW; }
  __device__ uint16_t w_mask() const { return ((1u << kW) - 1) << row() * kW; }
  __device__ uint16_t e_mask() const { return (kE == 1 ? 1u : 1u | 1u << kW) << column(); }
  __device__ bool writes_here(uint32_t other) const {
    return other < kCtas && ((w_mask() | e_mask()) >> other & 1) != 0;
  }
};

template <typename T, int BLOCK_M, typename S>
struct Layout {
  static_assert(BLOCK_M % (8 * S::kW) == 0, "each CTA of a cluster loads its share of W in whole swizzle atoms");
  static constexpr int kOutRows = out_rows(BLOCK_M);
  static constexpr int kOutChunks = BLOCK_M / kOutRows;
  static constexpr int kOutBuffers = kOutChunks < 3 ? kOutChunks : 3;
  static_assert(kOutBuffers >= 2, "a chunk is written while the one before is being stored");
  static constexpr int kStageBytes = (BLOCK_M + kWarpgroups * kColumnsPerWarpgroup) * kBlockK * sizeof(T);
  static constexpr int kOutBytes = kWarpgroups * kOutBuffers * kOutRows * kColumnsPerWarpgroup * sizeof(T);
  static constexpr int kRoomForStages = (kSharedBytes - kOutBytes - 1024) / kStageBytes;
  static constexpr int kStages = kRoomForStages < 8 ? kRoomForStages : 8;
  static_assert(kStages >= 3, "fewer stages cannot hide the latency of a load");
  // Steps before the end of K at which the broadcast sum is fetched, about the latency of the L2 cache.
  static constexpr int kPrefetchSteps = BLOCK_M >= 128 ? 2 : 4;
  // Vectors of it fetched then: the registers have no room for more beside the accumulator.
  static constexpr int kPrefetchVectors = BLOCK_M / 8 < kPrefetchVectorsAtMost ? BLOCK_M / 8 : kPrefetchVectorsAtMost;
};

template <typename T, int BLOCK_M, typename S>
struct SharedMemory {
  using L = Layout<T, BLOCK_M, S>;
  alignas(1024) T w[L::kStages][BLOCK_M * kBlockK];                                        // (BLOCK_M, kBlockK)
  alignas(1024) T e[L::kStages][kWarpgroups][kBlockK * kColumnsPerWarpgroup];              // (kBlockK, 64)
  alignas(1024) T out[kWarpgroups][L::kOutBuffers][L::kOutRows * kColumnsPerWarpgroup];    // (kOutRows, 64)
  alignas(8) uint64_t loaded[L::kStages];
  uint64_t consumed[L::kStages];
  uint64_t tile_published;
  uint64_t tile_read;
  uint64_t sources_ready;  // the broadcast units of this tile's candidates are in memory
  uint64_t sources_read;
  uint64_t flags_settled;  // this cluster sets and awaits no more flags
  int64_t source[kWarpgroups][kMaxBroadcastTerms];  // units, or kNoSource
  int tile;
};

constexpr int64_t kNoSource = -1;

struct Tile {
  int term;
  int m_tile;       // of this CTA; may lie past the last
  int first_block;  // of this CTA; may lie past the last
};

template <typename S>
__device__ inline Tile decode_tile(const LinearCompressionParams& params, int tile, S sharing) {
  int term = 0;
  int begin = 0;
  while (tile >= params.terms[term].tile_end) {
    begin = params.terms[term].tile_end;
    ++term;
  }
  const int local = tile - begin;
  const int group = local / params.m_groups;
  return {term, (local - group * params.m_groups) * S::kE + sharing.row(),
          group * S::kBlocks + sharing.column() * kWarpgroups};
}

// Where a reader of the published tiles stands.
struct TileReader {
  uint32_t parity = 0;

  // Every lane of the warp gets the tile; the scheduler learns that the warp has it.
  template <typename Shared>
  __device__ int next(Shared& shared, uint32_t lane) {
    mbarrier_wait_cluster(&shared.tile_published, parity);
    parity ^= 1;
    const int tile = *const_cast<volatile int*>(&shared.tile);
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive_remote(&shared.tile_read, 0);
    }
    return __shfl_sync(0xffffffff, tile, 0);  // the compiler may then take it for uniform
  }
};

template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ int previous() const { return stage == 0 ? STAGES - 1 : stage - 1; }

  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Deals tiles to the cluster: a warp of its first CTA.
template <typename S, typename Shared>
__device__ void schedule(const LinearCompressionParams& params, Shared& shared, uint32_t first_ticket, uint32_t lane) {
  if (lane == 0) {
    const uint32_t tickets = params.tile_end - params.tile_begin;
    uint32_t ticket = first_ticket;
    for (uint32_t parity = 0;; parity ^= 1) {
      const int tile = ticket < tickets ? params.tile_begin + static_cast<int>(ticket) : params.tile_end;
#pragma unroll
      for (int rank = 0; rank < S::kCtas; ++rank) {
        store_cluster(&shared.tile, rank, tile);
        mbarrier_arrive_remote_release(&shared.tile_published, rank);
      }
      mbarrier_wait(&shared.tile_read, parity);
      if (tile == params.tile_end) {
        break;
      }
      ticket = draw_ticket(params.tickets);
    }
    mbarrier_wait_cluster(&shared.flags_settled, 0);
  }
  __syncwarp();
  leave_and_reset(params, lane);
}

// Loads W and E for both warpgroups that multiply.
template <typename T, int BLOCK_M, typename S, typename Shared>
__device__ void produce(const LinearCompressionParams& params, Shared& shared, S sharing, uint32_t lane) {
  constexpr int kShareOfM = BLOCK_M / S::kW;
  Ring<Layout<T, BLOCK_M, S>::kStages> ring;
  ring.parity = 1;  // every stage is free at first
  TileReader tiles;
  for (;;) {
    const int index = tiles.next(shared, lane);
    if (index >= params.tile_end) {
      break;
    }
    const Tile tile = decode_tile(params, index, sharing);
    const int block = tile.first_block;
    const int row0 = block / params.column_blocks;
    const int column0 = (block - row0 * params.column_blocks) * kColumnsPerWarpgroup;
    const bool wraps = column0 + kColumnsPerWarpgroup >= params.column_blocks * kColumnsPerWarpgroup;
    const int row1 = wraps ? row0 + 1 : row0;
    const int column1 = wraps ? 0 : column0 + kColumnsPerWarpgroup;
    const int m = tile.m_tile * BLOCK_M + sharing.column() * kShareOfM;
    const LinearCompressionTermParams& term = params.terms[tile.term];
    const int k_tiles = term.whole_steps + (term.tail_instructions > 0 ? 1 : 0);
    const CUtensorMap* w_map = &params.w[tile.term];
    const CUtensorMap* e_map = &params.e[tile.term];
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      mbarrier_wait(&shared.consumed[ring.stage], ring.parity);
      if (lane == 0) {
        uint64_t* loaded = &shared.loaded[ring.stage];
        mbarrier_arrive_expect_bytes(loaded, Layout<T, BLOCK_M, S>::kStageBytes);
        const int k = k_tile * kBlockK;
        T* w = shared.w[ring.stage] + sharing.column() * kShareOfM * kBlockK;
        if constexpr (S::kW == 1) {
          tensor_load_2d(w, w_map, loaded, k, m);
        } else {
          tensor_load_2d_multicast(w, w_map, loaded, k, m, sharing.w_mask());
        }
        if constexpr (S::kE == 1) {
          tensor_load_3d(shared.e[ring.stage][0], e_map, loaded, column0, k, row0);
          tensor_load_3d(shared.e[ring.stage][1], e_map, loaded, column1, k, row1);
        } else {
          const bool first = sharing.row() == 0;
          tensor_load_3d_multicast(shared.e[ring.stage][sharing.row()], e_map, loaded, first ? column0 : column1, k,
                                   first ? row0 : row1, sharing.e_mask());
        }
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// Looks the candidates' broadcast units up and waits until they are in memory, ahead of the warpgroups that need them.
template <typename S, typename Shared>
__device__ void find_sources(const LinearCompressionParams& params, Shared& shared, S sharing, uint32_t lane) {
  const int warpgroup = static_cast<int>(lane) / kMaxBroadcastTerms;
  const int broadcast = static_cast<int>(lane) % kMaxBroadcastTerms;
  uint32_t read_parity = 1;
  TileReader tiles;
  for (;;) {
    const int index = tiles.next(shared, lane);
    if (index >= params.tile_end) {
      break;
    }
    const Tile tile = decode_tile(params, index, sharing);
    const int block = tile.first_block + warpgroup;
    int64_t unit = kNoSource;
    if (warpgroup < kWarpgroups && tile.term == params.broadcast_terms && broadcast < params.broadcast_terms &&
        block < params.terms[tile.term].blocks && tile.m_tile < params.m_tiles) {
      const LinearCompressionTermParams& term = params.terms[broadcast];
      const int candidate = block / params.column_blocks;
      const int row = term.index[candidate];
      if (row >= 0 && row < term.rows) {
        const int64_t source_block = static_cast<int64_t>(row) * params.column_blocks + block -
                                     static_cast<int64_t>(candidate) * params.column_blocks;
        unit = term.unit_begin + source_block * params.m_tiles + tile.m_tile;
        if (params.use_flags) {
          await_flag(params.flags + unit);
        }
      }
    }
    mbarrier_wait(&shared.sources_read, read_parity);
    read_parity ^= 1;
    if (warpgroup < kWarpgroups) {
      shared.source[warpgroup][broadcast] = unit;
    }
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&shared.sources_ready);
    }
  }
  if (lane == 0) {
    mbarrier_arrive_remote_release(&shared.flags_settled, 0);
  }
}

}  // namespace ikbo::kernels

#include "kernels/linear_compression_consumer.cuh"

namespace ikbo::kernels {

template <typename T, int BLOCK_M, typename S>
__global__ void __launch_bounds__(kThreads, 1)
    linear_compression_kernel(const __grid_constant__ LinearCompressionParams params) {
  using Shared = SharedMemory<T, BLOCK_M, S>;
  static_assert(sizeof(Shared) <= kSharedBytes, "more shared memory than a CTA can have");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32_t rank = S::kCtas == 1 ? 0 : cluster_cta_rank();
  const S sharing{rank};
  const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;

  constexpr uint32_t kProducerWarp = 0;
  constexpr uint32_t kSchedulerWarp = 1;
  constexpr uint32_t kSourceWarp = 2;
  constexpr uint32_t kSetUpWarp = 3;

  uint32_t first_ticket = 0;
  if (warp == kSchedulerWarp && rank == 0 && lane == 0) {
    first_ticket = draw_ticket(params.tickets);
  }
  if (warp == kSetUpWarp && lane == 0) {
    for (int stage = 0; stage < Layout<T, BLOCK_M, S>::kStages; ++stage) {
      mbarrier_init(&shared.loaded[stage], 1);
      mbarrier_init(&shared.consumed[stage], S::kWriters * kConsumerWarps);
    }
    mbarrier_init(&shared.tile_published, 1);
    mbarrier_init(&shared.tile_read, S::kCtas * (kConsumerWarps + 2));
    mbarrier_init(&shared.sources_ready, 1);
    mbarrier_init(&shared.sources_read, kConsumerWarps);
    mbarrier_init(&shared.flags_settled, S::kCtas * (kConsumerWarps + 1));
    fence_mbarrier_init();
  }
  if (warp == kProducerWarp && lane <= params.broadcast_terms && params.terms[lane].has_maps) {
    prefetch_tensor_map(&params.w[lane]);
    prefetch_tensor_map(&params.e[lane]);
  }
  __syncwarp();
  if constexpr (S::kCtas == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }

  if (threadIdx.x < kWarpgroupThreads) {
    register_decrease<kProducerRegisters>();
    if (warp == kProducerWarp) {
      produce<T, BLOCK_M>(params, shared, sharing, lane);
    } else if (warp == kSchedulerWarp && rank == 0) {
      schedule<S>(params, shared, first_ticket, lane);
    } else if (warp == kSourceWarp) {
      find_sources(params, shared, sharing, lane);
    }
  } else {
    register_increase<kConsumerRegisters>();
    consume<T, BLOCK_M>(params, shared, sharing, warp / 4 - 1, lane);
  }
  __syncwarp();
  if constexpr (S::kCtas > 1) {
    // A CTA stays until no other one of its cluster can still write to it.
    cluster_arrive();
    cluster_wait();
  }
}

template <typename T, int BLOCK_M, int SHARE_W, int SHARE_E>
cudaError_t launch(const LinearCompressionParams& params, int ctas, cudaStream_t stream) {
  const auto kernel = linear_compression_kernel<T, BLOCK_M, Sharing<SHARE_W, SHARE_E>>;
  constexpr int kBytes = sizeof(SharedMemory<T, BLOCK_M, Sharing<SHARE_W, SHARE_E>>);
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {SHARE_W * SHARE_E, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T, int BLOCK_M>
cudaError_t launch_shared(const LinearCompressionParams& params, const LinearCompressionConfig& config,
                          cudaStream_t stream) {
  if (config.share_e == 2) {
    return launch<T, BLOCK_M, 2, 2>(params, config.ctas, stream);
  }
  return config.share_w == 2 ? launch<T, BLOCK_M, 2, 1>(params, config.ctas, stream)
                             : launch<T, BLOCK_M, 1, 1>(params, config.ctas, stream);
}

}  // namespace ikbo::kernels
