// Shared memory of the tensor-core kernel of target attention, and places in its rings.
#pragma once

#include "kernels/target_attention_packed.cuh"
#include "kernels/target_attention_params.h"

namespace ikbo::kernels {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kAttentionThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kLoaders = 64;
constexpr int kReaders = 1 + kLoaders + kConsumers * kWarpgroup;  // of a drawn tile
constexpr int kTileSlots = 2;
constexpr int kStages = 2;
constexpr int kPanel = 64;  // elements of D in 128 bytes

template <typename T, int DIM, int KEYS>
struct alignas(1024) AttentionMemory {
  static constexpr int kPanels = DIM / kPanel;
  static constexpr int kQueryBuffers = DIM > 128 ? 1 : 2;
  // All 128-byte swizzled.
  T q[kQueryBuffers][kPanels][kTileRows][kPanel];
  T k[kStages][kPanels][KEYS][kPanel];
  T v[kStages][kPanels][KEYS][kPanel];
  uint32_t out_row[kQueryBuffers][kTileRows];  // of the result without D, or kNoRow
  AttentionTile tile[kTileSlots];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t q_full[kQueryBuffers], q_empty[kQueryBuffers];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
};

// A slot of a ring of COUNT, and the parity of the phase it is in.
template <int COUNT>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++slot == COUNT) {
      slot = 0;
      parity ^= 1;
    }
  }
};

__device__ inline int blocks_of(const AttentionTile& tile, int keys) {
  return (tile.kv_length + keys - 1) / keys;
}

}  // namespace ikbo::kernels
