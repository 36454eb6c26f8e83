// The warps of the tensor-core kernel of target attention that draw tiles and bring the data.
#pragma once

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_packed.cuh"

namespace ikbo::kernels {

// ---- One thread draws tiles, a tile ahead of the copies. It has a warp of its own: a draw takes longer than the
// copies can wait.
template <typename T, int DIM, int KEYS>
__device__ void draw_tiles(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory) {
  using namespace hopper;
  RingPosition<kTileSlots> at;
  const uint32_t tiles = params.workspace.header->tile_count;
  uint32_t number = blockIdx.x;
  while (true) {
    AttentionTile tile{};
    if (number < tiles) tile = params.workspace.tiles[number];
    memory.tile[at.slot] = tile;
    mbarrier_arrive(&memory.tile_full[at.slot]);
    if (tile.rows == 0) return;
    at.advance();
    mbarrier_wait(&memory.tile_empty[at.slot], at.parity ^ 1);
    number = gridDim.x + atomicAdd(&params.workspace.header->next_tile, 1u);
  }
}

// ---- One thread copies keys and values, the last block first: it is the one that is masked.
template <typename T, int DIM, int KEYS>
__device__ void produce(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory) {
  using namespace hopper;
  using Memory = AttentionMemory<T, DIM, KEYS>;
  constexpr uint32_t kBlockBytes = sizeof(memory.k[0]);
  RingPosition<kTileSlots> at;
  RingPosition<kStages> stage;
  bool is_first = true;
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    if (tile.rows == 0) return;
    at.advance();
    static_assert(kTileSlots == 2, "the next slot is that of the tile before");
    // That is given back only now, so that no tile is drawn long before it is needed.
    if (!is_first) mbarrier_arrive(&memory.tile_empty[at.slot]);
    is_first = false;
    const int user = params.problem.kv_offsets != nullptr ? 0 : tile.user;
    for (int block = blocks_of(tile, KEYS) - 1; block >= 0; --block) {
      const int row = tile.kv_first + block * KEYS;
      mbarrier_wait(&memory.k_empty[stage.slot], stage.parity ^ 1);
      mbarrier_arrive_expect_bytes(&memory.k_full[stage.slot], kBlockBytes);
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
        tensor_load_4d(memory.k[stage.slot][panel], &params.k, &memory.k_full[stage.slot], panel * kPanel, row,
                       tile.kv_head, user);
      }
      mbarrier_wait(&memory.v_empty[stage.slot], stage.parity ^ 1);
      mbarrier_arrive_expect_bytes(&memory.v_full[stage.slot], kBlockBytes);
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
        tensor_load_4d(memory.v[stage.slot][panel], &params.v, &memory.v_full[stage.slot], panel * kPanel, row,
                       tile.kv_head, user);
      }
      stage.advance();
    }
  }
}

// ---- Two warps gather the query rows of a tile, wherever their candidates stand: each the 64 rows of a warpgroup.
// Rows i * 32 to i * 32 + 31 of a half, of which every lane knows one. Behind `end` there may be no memory. Where rows
// begin anywhere, the 16 bytes are copied in which they lie, and whoever multiplies moves them.
template <typename T, int DIM, int KEYS, bool SHIFTED>
__device__ __forceinline__ void copy_queries(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory,
                                             int slot, int i, const T* query, const T* end) {
  using namespace hopper;
  constexpr int kChunksOfRow = DIM / kVector;
  constexpr int kLanesOfRow = kChunksOfRow < 32 ? kChunksOfRow : 32;
  constexpr int kRowsAtATime = 32 / kLanesOfRow;
  constexpr uint64_t kBytes = kVector * sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % kLanesOfRow;
  const int row_bytes = static_cast<int>(params.problem.head_dim) * static_cast<int>(sizeof(T));
  // Nothing is read of what `bytes` does not count; the address must be one all the same, of 16 bytes that exist.
  const auto copy = [&](T* to, uint64_t row, int of_row) {
    const int shift = SHIFTED ? static_cast<int>(row % kBytes) : 0;
    const int bytes = min(max(shift + row_bytes - of_row * static_cast<int>(kBytes), 0), static_cast<int>(kBytes));
    const bool reads = row != 0 && bytes > 0;
    const auto from = reinterpret_cast<const T*>(row - shift) + of_row * kVector;
    if (SHIFTED && reads && from + kVector > end) {
      for (int e = 0; e < kVector; ++e) to[e] = e * static_cast<int>(sizeof(T)) < bytes ? from[e] : T(0.0f);
      return;
    }
    cp_async_16(shared_address(to), reads ? from : static_cast<const T*>(params.problem.k), reads ? bytes : 0);
  };
#pragma unroll 4
  for (int j = 0; j < 32; j += kRowsAtATime) {
    const int from = j + lane / kLanesOfRow;
    const int row = i * 32 + from;
    copy(&memory.q[slot][chunk / kVector][row][(chunk % kVector ^ row % kVector) * kVector],
         __shfl_sync(0xffff'ffff, reinterpret_cast<uint64_t>(query), from), chunk);
  }
  if constexpr (SHIFTED) {
    const int row = i * 32 + lane;
    memory.q_shift[slot][row] = static_cast<uint8_t>(reinterpret_cast<uint64_t>(query) % kBytes / sizeof(T));
    if constexpr (DIM <= 128) copy(memory.q_more[slot][row], reinterpret_cast<uint64_t>(query), kChunksOfRow);
  }
}

template <typename T, int DIM, int KEYS, bool SHIFTED>
__device__ void gather_queries(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory, int number) {
  using namespace hopper;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kTileSlots> at;
  HalfPosition<AttentionMemory<T, DIM, KEYS>::kHalves> half(number);
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    if (tile.rows == 0) return;
    const int first = number * kHalfRows;
    const bool reads_any = tile.kv_length > 0 && first < tile.rows;
    // Where two rows a lane lie, while the buffer is perhaps still in use.
    PackedPlace place[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) place[i] = place_packed_row(params, tile, first + i * 32 + lane);
    const auto end =
        static_cast<const T*>(tile.queries == kTarget ? params.queries[kTarget].end : params.queries[kSelf].end);
    uint32_t out_row[2];
    const T* query[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PackedRow<T> row = packed_row_at<T>(params, tile, first + i * 32 + lane, place[i]);
      out_row[i] = row.out_row;
      query[i] = row.query;
    }
    mbarrier_wait(&memory.q_empty[half.slot], half.parity ^ 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      memory.out_row[half.slot][i * 32 + lane] = out_row[i];
      if (!reads_any) continue;
      copy_queries<T, DIM, KEYS, SHIFTED>(params, memory, half.slot, i, query[i], end);
    }
    if (reads_any) {
      cp_async_wait_all();
      fence_proxy_async_shared();
    }
    mbarrier_arrive(&memory.q_full[number][at.slot]);
    mbarrier_arrive(&memory.tile_empty[at.slot]);
    half.advance();
    at.advance();
  }
}

}  // namespace ikbo::kernels
