// What the linear-compression kernel fixes at compile time: tile, cluster, pipeline, shared memory.
#pragma once

#include <cstdint>

#include "kernels/linear_compression_params.h"

namespace ikbo::kernels {

constexpr int kBlockK = 64;        // 128 bytes: one row of the 128-byte swizzle
constexpr int kInstructionK = 16;  // of one matrix instruction
constexpr int kWarpgroupThreads = 128;
constexpr int kBlocksACta = 2;
constexpr int kSharedBytes = 232448;  // what a CTA can have on sm_90

template <typename T_, int BLOCK_M, int CLUSTER>
struct Plan {
  using T = T_;
  static_assert(sizeof(T) == 2, "a row of kBlockK elements is one row of the swizzle");
  static_assert(BLOCK_M % 8 == 0 && BLOCK_M <= 176, "the sums of a tile must fit in the registers of a warpgroup");

  static constexpr int kBlockM = BLOCK_M;
  static constexpr int kBlocks = kBlocksACta;  // of 64 columns, a tile of this CTA
  static constexpr int kWarpgroups = 2;        // that multiply, a tile each in turn
  static constexpr int kCluster = CLUSTER;     // CTAs that share each tile of W
  static constexpr int kWarpgroupWarps = 4;
  static constexpr int kThreads = (1 + kWarpgroups) * kWarpgroupThreads;

  // Rows of W that each CTA of a cluster loads for all: whole swizzle atoms. Where they do not come out even the shares
  // overlap and the same bytes are written twice.
  static constexpr int kShareOfM = share_of_w(BLOCK_M, CLUSTER);

  // 65,536 registers a multiprocessor; a CTA starts with an equal share a thread, rounded down to 8.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kOutBytes = kWarpgroups * BLOCK_M * kBlockColumns * sizeof(T);
  static constexpr int kWBytes = BLOCK_M * kBlockK * sizeof(T);
  static constexpr int kEBytes = kBlocks * kBlockColumns * kBlockK * sizeof(T);
  static constexpr int kLoadedWBytes = kShareOfM * CLUSTER * kBlockK * static_cast<int>(sizeof(T));
  static constexpr int kRoomForStages = (kSharedBytes - kOutBytes - 512) / (kWBytes + kEBytes);
  static constexpr int kStages = kRoomForStages < 8 ? kRoomForStages : 8;
  static_assert(kStages >= 3, "fewer stages cannot hide the latency of a load");

  // A thread's part of a unit is kVectors float4; kWindow of them are on their way while others are added.
  static constexpr int kVectors = BLOCK_M / 8;
  static constexpr int kWindowRoom = (208 - BLOCK_M) / 4;  // registers that the sums of two blocks leave
  static constexpr int kWindow = kVectors < kWindowRoom ? kVectors : kWindowRoom;
};

constexpr int64_t kNoSource = -1;
constexpr int kNoTile = -1;

enum class WorkKind : int { kNothing, kPartialSums, kCandidate };

// What a warpgroup does next, worked out for it by the planner warp.
struct alignas(16) Work {
  int steps;  // along K, or kNoWork
  int stage;  // where in the pipeline they begin
  uint32_t parity;
  int m;  // first row
};
constexpr int kNoWork = -1;

struct alignas(16) BlockWork {
  WorkKind kind;
  int candidate;
  int column;  // of out
  int reserved;
  int64_t unit;                        // kPartialSums: where the sums go
  int64_t source[kMaxBroadcastTerms];  // kCandidate: units to add, or kNoSource
};

template <typename P>
struct SharedMemory {
  using T = typename P::T;
  alignas(1024) T w[P::kStages][P::kBlockM * kBlockK];                 // (kBlockM, kBlockK)
  alignas(1024) T e[P::kStages][P::kBlocks][kBlockK * kBlockColumns];  // (kBlockK, 64)
  alignas(1024) T out[P::kWarpgroups][P::kBlockM * kBlockColumns];     // (kBlockM, 64)
  alignas(8) uint64_t loaded[P::kStages];
  uint64_t consumed[P::kStages];
  uint64_t tile_published;
  uint64_t tile_read;
  uint64_t turn[P::kWarpgroups];  // this warpgroup may multiply
  uint64_t work_ready[P::kWarpgroups];
  uint64_t sources_ready[P::kWarpgroups];  // the units to add are in memory
  uint64_t work_done[P::kWarpgroups];
  uint64_t flags_settled;  // this cluster sets and awaits no more flags
  Work work[P::kWarpgroups];
  BlockWork block[P::kWarpgroups][P::kBlocks];
  int tile;
};

// Warps of the first warpgroup.
enum ProducerWarp : uint32_t { kLoadWarp, kSchedulerWarp, kPlannerWarp, kSetUpWarp };

struct Tile {
  int term;
  int m_tile;
  int first_block;  // of this CTA; may lie past the last
  int blocks;
};

template <typename P>
__device__ inline Tile decode_tile(const LinearCompressionParams& params, int tile, uint32_t rank) {
  int term = 0;
  int begin = 0;
  while (tile >= params.terms[term].tile_end) {
    begin = params.terms[term].tile_end;
    ++term;
  }
  const int local = tile - begin;
  const int group = local / params.m_tiles;
  const int blocks = params.terms[term].tile_blocks;
  return {term, local - group * params.m_tiles, (group * P::kCluster + static_cast<int>(rank)) * blocks, blocks};
}

// Which row of E and which 64 of its columns a block is. The candidate term's blocks alternate between two consecutive
// candidates, so that the two blocks of a tile have the same columns and mostly the same user, whose sums are then
// fetched once for both.
struct BlockPlace {
  int row;  // may lie past the last
  int column_block;
};

__device__ inline BlockPlace locate_block(const LinearCompressionParams& params, bool is_candidate, int block) {
  static_assert(kBlocksACta == 2, "the blocks of a tile are a pair of candidates");
  if (is_candidate) {
    const int pair_block = block / 2;
    const int pair = pair_block / params.column_blocks;
    return {2 * pair + block % 2, pair_block - pair * params.column_blocks};
  }
  const int row = block / params.column_blocks;
  return {row, block - row * params.column_blocks};
}

// Where a pipeline stands.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ikbo::kernels
