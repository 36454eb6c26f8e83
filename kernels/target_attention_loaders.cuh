// The warps of the tensor-core kernel of target attention that draw tiles and bring the data.
#pragma once

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/mbarrier.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_own_list.cuh"
#include "kernels/target_attention_packed.cuh"
#include "kernels/tickets.cuh"

namespace ikbo::kernels {

// ---- A warp draws tiles, a tile ahead of the copies: a draw takes longer than these can wait. Tiles of a list that
// every CTA has made for itself are drawn by tickets, and its first one is out already; those of the list that was made
// for all are drawn by a counter that was set then.
template <typename T, int DIM, int KEYS>
__device__ void draw_tiles(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory) {
  using namespace hopper;
  using Memory = AttentionMemory<T, DIM, KEYS>;
  const bool leads = threadIdx.x % 32 == 0;
  const bool own = Memory::kHasOwnList && params.list == TileList::kOwnUsers;
  AttentionHeader* const header = params.workspace.header;
  RingPosition<kTileSlots> at;
  uint32_t tiles = 0;
  if constexpr (Memory::kHasOwnList) {
    if (own) tiles = memory.own.tiles;
  }
  if (!own) tiles = header->tile_count;
  const auto tile_at = [&](uint32_t number) -> AttentionTile {
    if constexpr (Memory::kHasOwnList) {
      const auto place = static_cast<int32_t>(number);
      if (own) return tile_of_users(params, memory.own.user, place, memory.own.self_is_void);
      if (params.list == TileList::kUsers) {
        return tile_of_users(params, params.workspace.users, place, header->self_is_void != 0);
      }
    }
    return params.workspace.tiles[number];
  };
  // What every CTA begins with is not drawn.
  const uint32_t drawn = tiles > gridDim.x ? tiles - gridDim.x : 0;
  uint32_t number = blockIdx.x;
  while (true) {
    if (!own || number != blockIdx.x) {
      AttentionTile tile{};
      if (number < tiles) tile = tile_at(number);
      if (leads) {
        memory.tile[at.slot] = tile;
        mbarrier_arrive(&memory.tile_full[at.slot]);
      }
    }
    if (number >= tiles) break;
    at.advance();
    mbarrier_wait(&memory.tile_empty[at.slot], at.parity ^ 1);
    uint32_t ticket = drawn;
    if (leads && drawn > 0) ticket = own ? draw_ticket(&header->tickets) : atomicAdd(&header->next_tile, 1u);
    number = gridDim.x + __shfl_sync(0xffff'ffff, ticket, 0);
  }
  if (own && leads && drawn > 0 && leaves_tickets_last(&header->tickets, drawn, gridDim.x)) {
    rewind_tickets(&header->tickets);
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
  int number = 0;  // of this CTA's tiles so far
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    if (tile.rows == 0) return;
    at.advance();
    static_assert(kTileSlots == 2, "the next slot is that of the tile before");
    // That is given back only now, so that no tile is drawn long before it is needed.
    if (number++ > 0) mbarrier_arrive(&memory.tile_empty[at.slot]);
    const int user = params.problem.kv_offsets != nullptr ? 0 : tile.user;
    for (int block = blocks_of(tile, KEYS) - 1; block >= 0; --block) {
      const int row = tile.kv_first + block * KEYS;
      mbarrier_wait(&memory.k_empty[stage.slot], stage.parity ^ 1);
      mbarrier_arrive_expect_bytes(&memory.k_full[stage.slot], kBlockBytes);
      for (int panel = 0; panel < Memory::kPanels; ++panel) {
        tensor_load_4d(memory.k[stage.slot][panel], &params.k, &memory.k_full[stage.slot], panel * kPanel, row,
                       tile.kv_head, user);
      }
      if (number == 1 && block == blocks_of(tile, KEYS) - 1) {
        // The first products wait for queries too: what is asked for before these would come before them.
        mbarrier_wait(&memory.q_requested, 0);
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
// Which lane copies what of rows i * 32 to i * 32 + 31 of a half.
template <int DIM>
struct QueryLanes {
  static constexpr int kChunksOfRow = DIM / kVector;
  static constexpr int kLanesOfRow = kChunksOfRow < 32 ? kChunksOfRow : 32;
  static constexpr int kRowsAtATime = 32 / kLanesOfRow;
};

// Rows of which every lane knows one, null where there is none. One warp does it, so what counts is how many
// instructions a row takes.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void copy_queries(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory,
                                             int slot, int i, const T* query) {
  using namespace hopper;
  using Lanes = QueryLanes<DIM>;
  constexpr int kBytes = kVector * sizeof(T);
  constexpr int kRowBytes = kPanel * sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % Lanes::kLanesOfRow;
  const int first = lane / Lanes::kLanesOfRow;
  const int row_bytes = static_cast<int>(params.problem.head_dim) * static_cast<int>(sizeof(T));
  const int bytes = min(max(row_bytes - chunk * kBytes, 0), kBytes);
  // Nothing is read of what the number of bytes does not count; the address must be one all the same.
  const int offset = bytes > 0 ? chunk * kBytes : 0;
  const uint32_t rows = __ballot_sync(0xffff'ffff, query != nullptr) >> first;
  const auto from = reinterpret_cast<uint64_t>(query != nullptr ? query : static_cast<const T*>(params.problem.k));
  const uint32_t to =
      shared_address(&memory.q[slot][chunk / kVector][i * 32 + first][0]) + (chunk ^ first) % 8 * kBytes;
#pragma unroll 8
  for (int j = 0; j < 32; j += Lanes::kRowsAtATime) {
    const uint64_t row = __shfl_sync(0xffff'ffff, from, j + first);
    cp_async_16((to ^ j % 8 * kBytes) + j * kRowBytes, reinterpret_cast<const unsigned char*>(row) + offset,
                (rows >> j & 1) != 0 ? bytes : 0);
  }
}

// By the copy engine: the packed rows from `row` of a half on that one candidate, or one history, has one after the
// other, as many as a box of its map has. Rows behind the tile's last are anything.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void load_piece(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory,
                                           const AttentionTile& tile, const PackedPlace& place, int slot, int row,
                                           uint64_t* barrier) {
  const bool is_target = tile.queries == kTarget;
  const CUtensorMap* const map = is_target ? &params.q[kTarget] : &params.q[kSelf];
  // All packed histories are one owner's.
  const bool has_owners = is_target || params.problem.kv_offsets == nullptr;
#pragma unroll
  for (int panel = 0; panel < AttentionMemory<T, DIM, KEYS>::kPanels; ++panel) {
    hopper::tensor_load_4d(memory.q[slot][panel][row], map, barrier, panel * kPanel, static_cast<int>(place.head),
                           static_cast<int>(place.query), has_owners ? static_cast<int>(place.owner) : 0);
  }
}

template <typename T, int DIM, int KEYS>
__device__ void gather_queries(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory, int number) {
  using namespace hopper;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kTileSlots> at;
  HalfPosition<AttentionMemory<T, DIM, KEYS>::kHalves> half(number);
  bool is_first = true;
  const auto requested = [&] {
    if (is_first && lane == 0) mbarrier_arrive(&memory.q_requested);
    is_first = false;
  };
  const auto candidate_at = [&](uint32_t i) { return memory.candidate_at(params, i); };
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    if (tile.rows == 0) return;
    const int first = number * kHalfRows;
    const bool reads_any = tile.kv_length > 0 && first < tile.rows;
    const int piece_bits =
        tile.queries == kTarget ? params.queries[kTarget].piece_bits : params.queries[kSelf].piece_bits;
    const bool by_engine = piece_bits >= 0;
    // Where a lane's piece lies, and its two rows, while the buffer is perhaps still in use.
    PackedPlace piece{};
    if (by_engine) piece = place_packed_row(params, candidate_at, tile, first + (lane << piece_bits));
    PackedPlace place[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) place[i] = place_packed_row(params, candidate_at, tile, first + i * 32 + lane);
    const auto row_of = [&](int i) { return packed_row_at<T>(params, tile, first + i * 32 + lane, place[i]); };
    uint64_t* const full = &memory.q_full[number][at.slot];
    mbarrier_wait(&memory.q_empty[half.slot], half.parity ^ 1);
    const bool copies = reads_any && !by_engine;
    uint32_t bytes = 0;
    if (reads_any && by_engine) {
      const int pieces = (min(tile.rows - first, kHalfRows) + (1 << piece_bits) - 1) >> piece_bits;
      if (lane < pieces) load_piece(params, memory, tile, piece, half.slot, lane << piece_bits, full);
      bytes = static_cast<uint32_t>(pieces << piece_bits) * DIM * sizeof(T);
    }
    if (!copies) requested();
#pragma unroll
    for (int i = 0; i < 2; ++i) memory.out_row[half.slot][i * 32 + lane] = row_of(i).out_row;
    if (copies) {
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_queries(params, memory, half.slot, i, row_of(i).query);
      requested();
      cp_async_wait_all();
      fence_proxy_async_shared();
    }
    if (bytes > 0 && lane == 0) {
      mbarrier_arrive_expect_bytes(full, bytes);
    } else {
      mbarrier_arrive(full);
    }
    mbarrier_arrive(&memory.tile_empty[at.slot]);
    half.advance();
    at.advance();
  }
}

}  // namespace ikbo::kernels
