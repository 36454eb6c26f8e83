// The warp of the linear-compression kernel that brings W and E.
#pragma once

#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/linear_compression_consumer.cuh"
#include "kernels/linear_compression_plan.cuh"

namespace ikbo::kernels {

// Loads W and E for the warpgroups that multiply.
template <typename P>
__device__ void load_tiles(const LinearCompressionParams& params, SharedMemory<P>& shared, uint32_t rank,
                           uint32_t lane) {
  // The next tile is drawn this many steps before it is needed: longer than a draw takes, and not much longer, since a
  // tile that one cluster holds is a tile that no other can take.
  constexpr int kDrawAhead = 12;
  const int share = min(static_cast<int>(rank) * P::kShareOfM, P::kBlockM - P::kShareOfM);
  Ring<P::kStages> ring;
  ring.parity = 1;  // every stage is free at first
  TileReader<P> tiles;
  for (;;) {
    const int index = tiles.next(shared);
    if (index == kNoTile) {
      tiles.done(shared, lane);
      break;
    }
    const Tile tile = decode_tile<P>(params, index, rank);
    int row[P::kBlocks];
    int column[P::kBlocks];
#pragma unroll
    for (int i = 0; i < P::kBlocks; ++i) {
      const BlockPlace place = locate_block(params, tile.term == params.broadcast_terms, tile.first_block + i);
      row[i] = place.row;
      column[i] = place.column_block * kBlockColumns;
    }
    const int m = tile.m_tile * P::kBlockM + share;
    const int steps = params.terms[tile.term].steps;
    const CUtensorMap* w_map = &params.w[tile.term];
    const CUtensorMap* e_map = &params.e[tile.term];
    if (steps == 0) {
      tiles.done(shared, lane);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (step == (steps > kDrawAhead ? steps - kDrawAhead : 0)) {
        tiles.done(shared, lane);
      }
      hopper::mbarrier_wait(&shared.consumed[ring.stage], ring.parity);
      if (lane == 0) {
        uint64_t* loaded = &shared.loaded[ring.stage];
        hopper::mbarrier_arrive_expect_bytes(loaded, P::kLoadedWBytes + tile.blocks * (P::kEBytes / P::kBlocks));
        const int k = step * kBlockK;
        auto* w = shared.w[ring.stage] + share * kBlockK;
        if constexpr (P::kCluster == 1) {
          hopper::tensor_load_2d(w, w_map, loaded, k, m);
        } else {
          hopper::tensor_load_2d_multicast(w, w_map, loaded, k, m, (1u << P::kCluster) - 1);
        }
#pragma unroll
        for (int i = 0; i < P::kBlocks; ++i) {
          // What the stage held before is multiplied in place of a block that the tile does not have, and dropped.
          if (i < tile.blocks) {
            hopper::tensor_load_3d(shared.e[ring.stage][i], e_map, loaded, column[i], k, row[i]);
          }
        }
      }
      __syncwarp();
      ring.advance();
    }
  }
}

}  // namespace ikbo::kernels
