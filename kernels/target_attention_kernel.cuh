// Target attention on the matrix unit: a persistent CTA takes tiles of 128 packed query rows of one user and key head.
//
// Four warps bring the data: one draws tiles, one copies blocks of keys and values (bulk copies), two gather the query
// rows of the next tile. Two warpgroups of 64 rows each multiply: while one has the matrix unit, the other does its
// softmax, and within a warpgroup the products with the values of one block run beside the softmax of the next. Tiles
// follow each other without a gap: the last values of one are multiplied beside the first keys of the next.
#pragma once

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/exp2.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_rows.cuh"

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
  int64_t out_row[kQueryBuffers][kTileRows];    // of (candidates, seeds, q_heads); -1: none
  int64_t query_row[kQueryBuffers][kTileRows];  // in elements of q
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

// ---- One thread draws tiles, a tile ahead of the copies. It has a warp of its own: a draw takes longer than the
// copies can wait.
template <typename T, int DIM, int KEYS>
__device__ void draw_tiles(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory) {
  using namespace hopper;
  RingPosition<kTileSlots> at;
  const uint32_t tiles = params.workspace.header->tile_count;
  uint32_t number = blockIdx.x;
  while (true) {
    const AttentionTile tile = number < tiles ? params.workspace.tiles[number] : AttentionTile{};
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

// ---- Two warps gather the query rows of a tile, wherever their candidates stand.
template <typename T, int DIM, int KEYS>
__device__ void gather_queries(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory, int thread) {
  using namespace hopper;
  using Memory = AttentionMemory<T, DIM, KEYS>;
  constexpr int kChunk = 8;  // elements of 16 bytes
  constexpr int kChunksOfRow = DIM / kChunk;
  const TargetAttentionProblem& p = params.problem;
  RingPosition<kTileSlots> at;
  RingPosition<Memory::kQueryBuffers> buffer;
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    mbarrier_arrive(&memory.tile_empty[at.slot]);
    at.advance();
    if (tile.rows == 0) return;
    mbarrier_wait(&memory.q_empty[buffer.slot], buffer.parity ^ 1);
    for (int row = thread; row < kTileRows; row += kLoaders) {
      int64_t out_row = -1;
      int64_t query_row = 0;
      if (row < tile.rows) {
        // 32 bits are enough: a user's rows are fewer than 2^31.
        const auto packed = static_cast<uint32_t>(tile.first_row + row);
        const auto rows_of_candidate = static_cast<uint32_t>(params.rows_of_candidate);
        const auto group = static_cast<uint32_t>(params.group);
        const uint32_t ordinal = packed / rows_of_candidate;
        const uint32_t within = packed - ordinal * rows_of_candidate;
        const uint32_t seed = within / group;
        const int64_t head = tile.kv_head * int64_t{group} + (within - seed * group);
        const int64_t candidate = params.workspace.order[tile.order_begin + ordinal];
        out_row = (candidate * p.seeds + seed) * p.q_heads + head;
        query_row = candidate * p.q_candidate_stride + seed * p.q_seed_stride + head * p.q_head_stride;
      }
      memory.out_row[buffer.slot][row] = out_row;
      memory.query_row[buffer.slot][row] = query_row;
    }
    if (tile.kv_length > 0) {
      named_barrier_sync(1, kLoaders);  // the rows' places
#pragma unroll 4
      for (int i = thread; i < kTileRows * kChunksOfRow; i += kLoaders) {
        const int row = i / kChunksOfRow;
        const int chunk = i % kChunksOfRow;
        const int columns = row < tile.rows ? min(kChunk, static_cast<int>(p.head_dim) - chunk * kChunk) : 0;
        const T* source = static_cast<const T*>(p.q);
        if (columns > 0) source += memory.query_row[buffer.slot][row] + chunk * kChunk;
        const uint32_t row_address = shared_address(memory.q[buffer.slot][chunk / 8][row]);
        cp_async_16(row_address + ((chunk % 8) ^ (row & 7)) * 16, source,
                    max(columns, 0) * static_cast<int>(sizeof(T)));
      }
      cp_async_wait_all();
      fence_proxy_async_shared();
    }
    mbarrier_arrive(&memory.q_full[buffer.slot]);
    buffer.advance();
  }
}

// ---- The softmax of a warpgroup's 64 rows. A thread has two of them, 8 apart.
// Largest of a block, for a thread's two rows, over the four threads that share them. NaN is passed over: the sums keep
// it.
template <int KEYS>
__device__ __forceinline__ void max_of_block(const float (&s)[KEYS / 2], float (&largest)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int i = 4; i < KEYS / 2; ++i) part[i % 4] = fmaxf(part[i % 4], s[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(part[2 * h], part[2 * h + 1]);
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffff'ffff, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffff'ffff, largest[h], 2));
  }
}

// What the weights of a thread's two rows are relative to, as an exponent of 2, and this thread's part of their sum.
struct RowState {
  float shift[2];
  float sum[2];
};

// s becomes the weights, and their sum is added to the thread's own part.
template <int KEYS>
__device__ __forceinline__ void weigh_block(float (&s)[KEYS / 2], RowState& rows, float scale_log2) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) {
    s[i] = hopper::exp2_approximate(fmaf(s[i], scale_log2, -rows.shift[i / 2 % 2]));
    rows.sum[i / 2 % 2] += s[i];
  }
}

// A row without a finite logit so far is relative to this instead of to infinity.
constexpr float kLowestShift = -1e37f;

template <int KEYS>
__device__ __forceinline__ void weigh_first_block(float (&s)[KEYS / 2], RowState& rows, float scale_log2) {
  float largest[2];
  max_of_block<KEYS>(s, largest);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.shift[h] = fmaxf(__fmul_rn(largest[h], scale_log2), kLowestShift);
    rows.sum[h] = 0;
  }
  weigh_block<KEYS>(s, rows, scale_log2);
}

// Returns whether a row of this warp has a correction other than 1 to apply to its output.
template <int KEYS>
__device__ __forceinline__ bool weigh_next_block(float (&s)[KEYS / 2], RowState& rows, float (&correction)[2],
                                                 float scale_log2) {
  float largest[2];
  max_of_block<KEYS>(s, largest);
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // The same rounded products for the weights and for the correction, so that large logits do not part them.
    const float shift = __fmul_rn(largest[h], scale_log2);
    const bool moves = shift > rows.shift[h];
    correction[h] = moves ? hopper::exp2_approximate(rows.shift[h] - shift) : 1.0f;
    rows.shift[h] = moves ? shift : rows.shift[h];
    rows.sum[h] *= correction[h];
    moved |= moves;
  }
  weigh_block<KEYS>(s, rows, scale_log2);
  return __any_sync(0xffff'ffff, moved);
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <typename T, int KEYS>
__device__ __forceinline__ void narrow_weights(const float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 16][4]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) weights[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
}

// ---- A warpgroup that multiplies.
template <typename T, int DIM, int KEYS>
class Consumer {
  using Memory = AttentionMemory<T, DIM, KEYS>;
  static constexpr int kPanels = Memory::kPanels;
  static constexpr uint32_t kQueryPanelBytes = kTileRows * 128;
  static constexpr uint32_t kKeyPanelBytes = KEYS * 128;
  static constexpr uint32_t kFirstTurn = 2;  // names of the barriers by which the warpgroups take turns
  static constexpr uint32_t kOwn = 4;        // and of those within one
  // A tile begins beside the end of the one before, whose queries' buffer is given back only then.
  static constexpr bool kChains = Memory::kQueryBuffers > 1;

  struct Work {
    bool has_rows = false;  // else there is no more
    bool has_user = false;
    int kv_length = 0;
    int slot = 0;  // of the queries
  };

 public:
  __device__ Consumer(const AttentionParams& params, Memory& memory, int number)
      : params_(params), memory_(memory), number_(number), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    using namespace hopper;
    float o[DIM / 2];
    float s[KEYS / 2];
    uint32_t weights[KEYS / 16][4];
    RowState rows;
    // The first turn is the first warpgroup's.
    if (number_ == 1) named_barrier_arrive(kFirstTurn, kConsumers * kWarpgroup);
    Work work = take_work();
    while (true) {
      while (work.has_rows && work.kv_length == 0) {
        fill(work);
        work = take_work();
      }
      if (!work.has_rows) return;
      begin(work, s, weights, rows);
      for (bool chained = true; chained;) {
        const int blocks = (work.kv_length + KEYS - 1) / KEYS;
        const int tail = work.kv_length - (blocks - 1) * KEYS;
        for (int i = 1; i < blocks; ++i) step(i, tail, s, o, weights, rows, work.slot);
        Work next{};
        if constexpr (kChains) next = take_work();
        chained = next.kv_length > 0;
        if (chained) {
          chain(blocks, tail, s, o, weights, rows, work, next);
        } else {
          finish(blocks, tail, o, weights, rows, work);
          if constexpr (!kChains) next = take_work();
        }
        work = next;
      }
    }
  }

 private:
  __device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], int queries) {
    using namespace hopper;
    const uint32_t q = descriptor_of(&memory_.q[queries][0][number_ * 64][0]);
    const uint32_t k = descriptor_of(&memory_.k[keys_.slot][0][0][0]);
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      const uint32_t q_offset = descriptor_offset(i / 4 * kQueryPanelBytes + i % 4 * 32);
      const uint32_t k_offset = descriptor_offset(i / 4 * kKeyPanelBytes + i % 4 * 32);
      WgmmaKMajor<T, KEYS>::multiply(s, swizzled_descriptor(q + q_offset), swizzled_descriptor(k + k_offset), i > 0);
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ void start_output(float (&o)[DIM / 2], const uint32_t (&weights)[KEYS / 16][4],
                                               bool accumulate) {
    using namespace hopper;
    const uint32_t v = panelled_descriptor_of(&memory_.v[values_.slot][0][0][0], kKeyPanelBytes);
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
      WgmmaRegisters<T, DIM>::multiply(o, weights[i], swizzled_descriptor(v + descriptor_offset(i * 16 * 128)),
                                       i > 0 || accumulate);
    }
    wgmma_commit_group();
  }

  // What follows a history is another user's, or was never written: a weight of 0 would not keep its NaN out.
  __device__ void clear_tail_of_values(int valid) {
    using namespace hopper;
    if (valid == KEYS) return;
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    for (int i = thread_; i < kPanels * (KEYS - valid) * 8; i += kWarpgroup) {
      const int row = valid + i / 8 % (KEYS - valid);
      const int panel = i / 8 / (KEYS - valid);
      reinterpret_cast<uint4*>(memory_.v[values_.slot][panel][row])[i % 8] = uint4{0, 0, 0, 0};
    }
    fence_proxy_async_shared();
    named_barrier_sync(kOwn + number_, kWarpgroup);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (thread_ % 32 == 0) hopper::mbarrier_arrive(barrier);
  }

  // The next tile, once its queries are there.
  __device__ Work take_work() {
    using namespace hopper;
    mbarrier_wait(&memory_.tile_full[tile_.slot], tile_.parity);
    const AttentionTile& tile = memory_.tile[tile_.slot];
    const Work work{tile.rows > 0, tile.user >= 0, tile.kv_length, queries_.slot};
    mbarrier_arrive(&memory_.tile_empty[tile_.slot]);
    tile_.advance();
    if (work.has_rows) {
      mbarrier_wait(&memory_.q_full[queries_.slot], queries_.parity);
      queries_.advance();
    }
    return work;
  }

  __device__ __forceinline__ void wait_for_scores(float (&s)[KEYS / 2], bool output_runs) {
    using namespace hopper;
    if (output_runs) {
      wgmma_wait_group<1>();
    } else {
      wgmma_wait_group<0>();
    }
    pin_registers(s);
    release(&memory_.k_empty[keys_.slot]);
    keys_.advance();
  }

  __device__ __forceinline__ void wait_for_output(float (&o)[DIM / 2]) {
    using namespace hopper;
    wgmma_wait_group<0>();
    pin_registers(o);
    release(&memory_.v_empty[values_.slot]);
    values_.advance();
  }

  // The scores of the next block of keys and the products with the values of the block before, in this warpgroup's
  // turn.
  __device__ __forceinline__ void start_both(float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                             const uint32_t (&weights)[KEYS / 16][4], int queries, bool first_values,
                                             int tail) {
    using namespace hopper;
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    if (first_values) clear_tail_of_values(tail);
    named_barrier_sync(kFirstTurn + number_, kConsumers * kWarpgroup);
    wgmma_fence();
    start_scores(s, queries);
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    start_output(o, weights, !first_values);
    named_barrier_arrive(kFirstTurn + (number_ ^ 1), kConsumers * kWarpgroup);
    wait_for_scores(s, true);
  }

  // A tile's first block, the one that is masked, alone.
  __device__ __forceinline__ void begin(const Work& work, float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 16][4],
                                        RowState& rows) {
    using namespace hopper;
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    wgmma_fence();
    start_scores(s, work.slot);
    wait_for_scores(s, false);
    mask_tail(s, work.kv_length);
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    narrow_weights<T, KEYS>(s, weights);
  }

  // Block `number` of a tile.
  __device__ __forceinline__ void step(int number, int tail, float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                       uint32_t (&weights)[KEYS / 16][4], RowState& rows, int queries) {
    start_both(s, o, weights, queries, number == 1, tail);
    float correction[2];
    const bool corrects = weigh_next_block<KEYS>(s, rows, correction, params_.scale_log2);
    wait_for_output(o);
    narrow_weights<T, KEYS>(s, weights);
    if (corrects) {
#pragma unroll
      for (int i = 0; i < DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
    }
  }

  // The last values of a tile beside the first keys of the next.
  __device__ __forceinline__ void chain(int blocks, int tail, float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                        uint32_t (&weights)[KEYS / 16][4], RowState& rows, const Work& work,
                                        const Work& next) {
    start_both(s, o, weights, next.slot, blocks == 1, tail);
    mask_tail(s, next.kv_length);
    const RowState ended = rows;
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    wait_for_output(o);
    narrow_weights<T, KEYS>(s, weights);
    store(o, ended, work.slot);
  }

  // The last values of a tile, alone.
  __device__ __forceinline__ void finish(int blocks, int tail, float (&o)[DIM / 2],
                                         const uint32_t (&weights)[KEYS / 16][4], const RowState& rows,
                                         const Work& work) {
    using namespace hopper;
    if (blocks == 1) clear_tail_of_values(tail);
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    wgmma_fence();
    start_output(o, weights, blocks > 1);
    wait_for_output(o);
    store(o, rows, work.slot);
  }

  // Only the first block that is read, the last one of the history, can be partial.
  __device__ __forceinline__ void mask_tail(float (&s)[KEYS / 2], int kv_length) {
    const int tail = kv_length - (kv_length - 1) / KEYS * KEYS;
    if (tail == KEYS) return;
    const int column = 2 * (thread_ % 4);
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      if (i / 4 * 8 + column + i % 2 >= tail) s[i] = -infinity<float>();
    }
  }

  __device__ int64_t out_row(int slot, int half) const {
    return memory_.out_row[slot][number_ * 64 + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * half];
  }

  // Rounds, and writes out straight from the registers: the four threads of a row exchange their pairs of columns, so
  // that each writes 16 bytes.
  __device__ __forceinline__ void store(float (&o)[DIM / 2], const RowState& rows, int slot) {
    const TargetAttentionProblem& p = params_.problem;
    const int quarter = thread_ % 4;
    int64_t number[2];
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffff'ffff, sum, 1);
      sum += __shfl_xor_sync(0xffff'ffff, sum, 2);
      factor[h] = 1 / sum;
      number[h] = out_row(slot, h);
      if (p.logsumexp != nullptr && quarter == 0 && number[h] >= 0) {
        constexpr float kLn2 = 0.6931471805599453f;
        static_cast<float*>(p.logsumexp)[number[h]] = (rows.shift[h] + log2f(sum)) * kLn2;
      }
    }
    hopper::mbarrier_arrive(&memory_.q_empty[slot]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* const row = static_cast<T*>(p.out) + number[h] * p.head_dim;
#pragma unroll
      for (int i = 0; i < DIM / 32; ++i) {
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* from = &o[4 * (4 * i + j) + 2 * h];
          pair[j] = pack<T>(from[0] * factor[h], from[1] * factor[h]);
        }
        transpose_of_four(pair, quarter);
        const int column = 32 * i + 8 * quarter;
        if (number[h] >= 0 && column < p.head_dim) write(row, column, pair);
      }
    }
  }

  // pair[j] of thread i becomes pair[i] of thread j, among four neighbours.
  static __device__ __forceinline__ void transpose_of_four(uint32_t (&pair)[4], int quarter) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = (quarter & distance) != 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((j & distance) != 0) continue;
        const uint32_t sent = upper ? pair[j] : pair[j + distance];
        const uint32_t got = __shfl_xor_sync(0xffff'ffff, sent, distance);
        pair[j] = upper ? got : pair[j];
        pair[j + distance] = upper ? pair[j + distance] : got;
      }
    }
  }

  __device__ __forceinline__ void write(T* row, int column, const uint32_t (&pair)[4]) {
    const TargetAttentionProblem& p = params_.problem;
    if (params_.rows_by_vectors) {
      *reinterpret_cast<uint4*>(row + column) = uint4{pair[0], pair[1], pair[2], pair[3]};
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto bits = static_cast<uint16_t>(pair[j / 2] >> (j % 2 * 16));
      if (column + j < p.head_dim) reinterpret_cast<uint16_t*>(row)[column + j] = bits;
    }
  }

  // Rows without history, or of a user that does not exist.
  __device__ void fill(const Work& work) {
    const TargetAttentionProblem& p = params_.problem;
    const float value = work.has_user ? 0.0f : quiet_nan<float>();
    const uint32_t pair[4] = {pack<T>(value, value), pack<T>(value, value), pack<T>(value, value),
                              pack<T>(value, value)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t number = out_row(work.slot, h);
      if (number < 0) continue;
      for (int column = 8 * (thread_ % 4); column < p.head_dim; column += 32) {
        write(static_cast<T*>(p.out) + number * p.head_dim, column, pair);
      }
      if (p.logsumexp != nullptr && thread_ % 4 == 0) {
        static_cast<float*>(p.logsumexp)[number] = work.has_user ? -infinity<float>() : value;
      }
    }
    hopper::mbarrier_arrive(&memory_.q_empty[work.slot]);
  }

  const AttentionParams& params_;
  Memory& memory_;
  int number_;
  int thread_;  // of the warpgroup
  RingPosition<kTileSlots> tile_;
  RingPosition<Memory::kQueryBuffers> queries_;
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
};

template <typename T, int DIM, int KEYS>
__global__ __launch_bounds__(kAttentionThreads,
                             1) void attention_kernel(const __grid_constant__ AttentionParams params) {
  using namespace hopper;
  using Memory = AttentionMemory<T, DIM, KEYS>;
  extern __shared__ unsigned char bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes + (1024 - shared_address(bytes) % 1024) % 1024);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = kConsumers * kWarpgroup;
    constexpr int kConsumerWarps = kConsumerThreads / 32;
    for (int i = 0; i < kTileSlots; ++i) {
      mbarrier_init(&memory.tile_full[i], 1);
      mbarrier_init(&memory.tile_empty[i], kReaders);
    }
    for (int i = 0; i < Memory::kQueryBuffers; ++i) {
      mbarrier_init(&memory.q_full[i], kLoaders);
      mbarrier_init(&memory.q_empty[i], kConsumerThreads);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&memory.k_full[i], 1);
      mbarrier_init(&memory.v_full[i], 1);
      mbarrier_init(&memory.k_empty[i], kConsumerWarps);
      mbarrier_init(&memory.v_empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  grid_dependency_wait();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    register_decrease<40>();
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&params.k);
      prefetch_tensor_map(&params.v);
      produce<T, DIM, KEYS>(params, memory);
    } else if (threadIdx.x == 32) {
      draw_tiles<T, DIM, KEYS>(params, memory);
    } else if (threadIdx.x >= 64) {
      gather_queries<T, DIM, KEYS>(params, memory, static_cast<int>(threadIdx.x) - 64);
    }
  } else {
    register_increase<232>();
    Consumer<T, DIM, KEYS>(params, memory, warpgroup - 1).run();
  }
}

}  // namespace ikbo::kernels
