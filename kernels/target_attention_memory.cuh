// Shared memory of the tensor-core kernel of target attention, and places in its rings.
#pragma once

#include "kernels/target_attention_packed.cuh"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_user_list.cuh"

namespace ikbo::kernels {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kAttentionThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kLoaders = kConsumers * 32;
constexpr int kReaders = 1 + kLoaders + kConsumers * kWarpgroup;  // of a drawn tile
constexpr int kTileSlots = 2;
constexpr int kStages = 2;
static_assert(kHalfRows * kConsumers == kTileRows);
constexpr int kPanel = 64;  // elements of D in 128 bytes
constexpr int kVector = 8;  // and in 16
// Blocks of keys of a history above which results are staged: a half is given back later for that, and where there are
// few blocks a tile, its next queries would come too late.
constexpr int kLeastStagedBlocks = 2;
constexpr int kStagedKeys = 128;  // of a block

// Where every CTA makes the list of tiles itself (kernels/target_attention_own_list.cuh): how many candidates a thread
// counts at most. From about 5,500 candidates on, two launches before this one are faster.
constexpr int kOwnSteps = 12;
constexpr int kMostOwnCandidates = kOwnSteps * kAttentionThreads;
// What the list is made from: in the place of queries, before there are any.
struct OwnScratch {
  UserShare share[kMostListedUsers + 1];
  // A user's candidates that a warp counted, and then those of the warps before.
  int32_t counted[kAttentionThreads / 32][kMostListedUsers + 1];
};
struct OwnList {
  ListedUser user[kMostListedUsers + 1];
  uint16_t order[kMostOwnCandidates];  // grouped by user
  int32_t tiles;
  bool self_is_void;  // whether offsets decrease
};
struct NoOwnList {};

template <typename T, int DIM, int KEYS>
struct alignas(1024) AttentionMemory {
  static constexpr int kPanels = DIM / kPanel;
  static constexpr int kHalves = DIM > 128 ? 2 : 4;  // of tiles' queries
  // Whether the next tile's queries have room beside this one's.
  static constexpr bool kChains = kHalves > kConsumers;
  // All 128-byte swizzled.
  T q[kHalves][kPanels][kHalfRows][kPanel];
  T k[kStages][kPanels][KEYS][kPanel];
  T v[kStages][kPanels][KEYS][kPanel];
  // Of queries that do not begin at multiples of 16 bytes: how many elements of the row before come first, and what of
  // the row therefore comes behind its place.
  uint8_t q_shift[kHalves][kHalfRows];
  T q_rest[kHalves][kHalfRows][kVector];
  uint32_t out_row[kHalves][kHalfRows];  // of the result without D, or kNoRow
  AttentionTile tile[kTileSlots];
  static constexpr bool kHasOwnList = DIM <= kMostListedDim;  // above, there is no room
  std::conditional_t<kHasOwnList, OwnList, NoOwnList> own;
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t q_full[kConsumers][kTileSlots], q_empty[kHalves];
  uint64_t q_requested;  // of the first tile
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];

  __device__ OwnScratch& own_scratch() {
    static_assert(sizeof(OwnScratch) <= sizeof(q));
    return *reinterpret_cast<OwnScratch*>(q);
  }
  // Candidate i of those that are grouped by user, whoever grouped them.
  __device__ uint32_t candidate_at(const AttentionParams& params, uint32_t i) const {
    if constexpr (kHasOwnList) {
      if (params.list == TileList::kOwnUsers) return own.order[i];
    }
    return params.workspace.order[i];
  }
};

// With room for the results of eight rows of every warp that multiplies.
template <typename T, int DIM, int KEYS>
struct UnalignedMemory : AttentionMemory<T, DIM, KEYS> {
  alignas(128) T results[kConsumers * kWarpgroup / 32][DIM / kPanel][8][kPanel];
};
// Above D 128 there is none, and results go to where the queries were.
template <typename T, int DIM, int KEYS, RowPath PATH>
using KernelMemory = std::conditional_t<PATH == RowPath::kUnaligned && DIM <= 128, UnalignedMemory<T, DIM, KEYS>,
                                        AttentionMemory<T, DIM, KEYS>>;

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

// The place of a tile's half, `number`, in the ring of halves: tile 0's first, its second, tile 1's first and so on. A
// parity says which of two phases a slot is in, no more. Whoever writes a half waits for its slot's last reader; that
// the reader before is done as well is due to the ring of tiles: tile t + 2 is drawn when all have tile t, and who has
// that has given its half of tile t - 1 back. Readers wait for their own writer, by the place of the tile.
template <int HALVES>
struct HalfPosition {
  int slot;
  uint32_t parity = 0;
  __device__ explicit HalfPosition(int number) : slot(number) {}
  __device__ void advance() {
    static_assert(HALVES >= kConsumers);
    slot += kConsumers;
    if (slot >= HALVES) {
      slot -= HALVES;
      parity ^= 1;
    }
  }
};

__device__ inline int blocks_of(const AttentionTile& tile, int keys) {
  return (tile.kv_length + keys - 1) / keys;
}

}  // namespace ikbo::kernels
