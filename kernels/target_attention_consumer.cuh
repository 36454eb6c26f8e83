// The warpgroups of the tensor-core kernel of target attention that multiply.
#pragma once

#include "kernels/hopper/store_if.h"
#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_rows.cuh"
#include "kernels/target_attention_softmax.cuh"

namespace ikbo::kernels {

// ---- A warpgroup that multiplies.
template <typename T, int DIM, int KEYS, bool SHIFTED>
class Consumer {
  using Memory = AttentionMemory<T, DIM, KEYS>;
  static constexpr int kPanels = Memory::kPanels;
  static constexpr uint32_t kQueryPanelBytes = kHalfRows * 128;
  static constexpr uint32_t kKeyPanelBytes = KEYS * 128;
  static constexpr uint32_t kFirstTurn = 2;  // names of the barriers by which the warpgroups take turns
  static constexpr uint32_t kOwn = 4;        // and of those within one

  struct Work {
    bool has_rows = false;  // else there is no more
    bool has_user = false;
    bool multiplies = false;  // whether any row is in this warpgroup's half, and there is a history
    int kv_length = 0;
    int slot = 0;     // of its half in shared memory
    int queries = 0;  // which these are
    uint32_t out_row[2] = {kNoRow, kNoRow};
  };

 public:
  __device__ Consumer(const AttentionParams& params, Memory& memory, int number)
      : params_(params),
        memory_(memory),
        number_(number),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup),
        half_(number) {}

  __device__ void run() {
    using namespace hopper;
    float o[DIM / 2];
    float s[KEYS / 2];
    uint32_t weights[KEYS / 16][4];
    RowState rows;
    // The first turn is the first warpgroup's.
    if (number_ == 1) give_turn();
    Work work = take_work();
    while (true) {
      while (work.has_rows && !work.multiplies) work = pass_tile(work);
      if (!work.has_rows) return;
      begin(work, s, weights, rows);
      for (bool chained = true; chained;) {
        const int blocks = (work.kv_length + KEYS - 1) / KEYS;
        const int tail = work.kv_length - (blocks - 1) * KEYS;
        for (int i = 1; i < blocks; ++i) step(i, i + 1 == blocks, tail, s, o, weights, rows, work.slot);
        if constexpr (Memory::kChains) {
          const Work next = take_work();
          chained = next.multiplies;
          if (chained) {
            chain(blocks, tail, s, o, weights, rows, work, next);
          } else {
            finish(blocks, tail, next.kv_length > 0, o, weights, rows, work);
          }
          work = next;
        } else {
          chained = false;
          finish(blocks, tail, false, o, weights, rows, work);
          work = take_work();
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], int queries) {
    using namespace hopper;
    const uint32_t q = descriptor_of(&memory_.q[queries][0][0][0]);
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

  // Moves rows to the multiples of 16 bytes at which the products look for them: two threads of a warp a row.
  __device__ void shift_queries(int slot) {
    using namespace hopper;
    constexpr int kVectors = DIM / 16 < 8 ? DIM / 16 : 8;  // of a thread at a time
    constexpr int kWords = 4 * kVectors;
    const int row = thread_ / 2;
    const int shift = memory_.q_shift[slot][row];
    const auto vector = [&](int at) {
      return reinterpret_cast<uint4*>(memory_.q[slot][at / kVector][row]) + (at % kVector ^ row % kVector);
    };
#pragma unroll
    for (int pass = 0; pass < DIM / 8; pass += 2 * kVectors) {
      const int first = pass + thread_ % 2 * kVectors;
      uint32_t word[kWords + 4];
      const auto keep = [&](int i, const uint4& read) {
        word[4 * i] = read.x, word[4 * i + 1] = read.y, word[4 * i + 2] = read.z, word[4 * i + 3] = read.w;
      };
#pragma unroll
      for (int i = 0; i < kVectors; ++i) keep(i, *vector(first + i));
      const bool is_last = first + kVectors == DIM / 8;
      keep(kVectors, is_last ? *reinterpret_cast<const uint4*>(memory_.q_more[slot][row]) : *vector(first + kVectors));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kWords + 2; ++i) word[i] = (shift & 4) != 0 ? word[i + 2] : word[i];
#pragma unroll
      for (int i = 0; i < kWords + 1; ++i) word[i] = (shift & 2) != 0 ? word[i + 1] : word[i];
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], (shift & 1) * 16);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        *vector(first + i) = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
      }
    }
    fence_proxy_async_shared();
    named_barrier_sync(kOwn + number_, kWarpgroup);
  }

  // The next tile, once its queries are there.
  __device__ Work take_work() {
    using namespace hopper;
    mbarrier_wait(&memory_.tile_full[tile_.slot], tile_.parity);
    const AttentionTile& tile = memory_.tile[tile_.slot];
    const bool multiplies = tile.rows > number_ * kHalfRows && tile.kv_length > 0;
    Work work{tile.rows > 0, tile.user >= 0, multiplies, tile.kv_length, half_.slot, tile.queries};
    if (work.has_rows) {
      mbarrier_wait(&memory_.q_full[number_][tile_.slot], tile_.parity);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        work.out_row[h] = memory_.out_row[work.slot][thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h];
      }
      if (!multiplies) mbarrier_arrive(&memory_.q_empty[work.slot]);
      half_.advance();
    }
    mbarrier_arrive(&memory_.tile_empty[tile_.slot]);
    tile_.advance();
    return work;
  }

  __device__ __forceinline__ void wait_for_scores(float (&s)[KEYS / 2], bool output_runs, int queries, bool last) {
    using namespace hopper;
    if (output_runs) {
      wgmma_wait_group<1>();
    } else {
      wgmma_wait_group<0>();
    }
    pin_registers(s);
    release(&memory_.k_empty[keys_.slot]);
    if (last) hopper::mbarrier_arrive(&memory_.q_empty[queries]);  // these were the last scores of the tile
    keys_.advance();
  }

  __device__ __forceinline__ void wait_for_output(float (&o)[DIM / 2]) {
    using namespace hopper;
    wgmma_wait_group<0>();
    pin_registers(o);
    release(&memory_.v_empty[values_.slot]);
    values_.advance();
  }

  __device__ __forceinline__ void take_turn() {
    if (params_.takes_turns) hopper::named_barrier_sync(kFirstTurn + number_, kConsumers * kWarpgroup);
  }
  __device__ __forceinline__ void give_turn() {
    if (params_.takes_turns) hopper::named_barrier_arrive(kFirstTurn + (number_ ^ 1), kConsumers * kWarpgroup);
  }

  // A tile without a history, or whose rows are the other warpgroup's alone: keys and values go by unread, in turn, as
  // if they were multiplied. Returns the next.
  __device__ Work pass_tile(const Work& work) {
    if (work.kv_length == 0) {
      fill(work);
      return take_work();
    }
    const int blocks = (work.kv_length + KEYS - 1) / KEYS;
    pass_keys();
    for (int i = 1; i < blocks; ++i) {
      pass_keys();
      pass_values(true);
    }
    const Work next = take_work();
    pass_values(next.kv_length > 0);
    return next;
  }
  __device__ void pass_keys() {
    hopper::mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    release(&memory_.k_empty[keys_.slot]);
    keys_.advance();
  }
  __device__ void pass_values(bool in_turn) {
    hopper::mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    if (in_turn) {
      take_turn();
      give_turn();
    }
    release(&memory_.v_empty[values_.slot]);
    values_.advance();
  }

  // The scores of the next block of keys and the products with the values of the block before, in this warpgroup's
  // turn.
  __device__ __forceinline__ void start_both(float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                             const uint32_t (&weights)[KEYS / 16][4], int queries, bool last,
                                             bool first_values, int tail) {
    using namespace hopper;
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    if (first_values) clear_tail_of_values(tail);
    take_turn();
    wgmma_fence();
    start_scores(s, queries);
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    start_output(o, weights, !first_values);
    wait_for_scores(s, true, queries, last);
    give_turn();
  }

  // A tile's first block, the one that is masked, alone.
  __device__ __forceinline__ void begin(const Work& work, float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 16][4],
                                        RowState& rows) {
    using namespace hopper;
    if constexpr (SHIFTED) shift_queries(work.slot);
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    wgmma_fence();
    start_scores(s, work.slot);
    wait_for_scores(s, false, work.slot, work.kv_length <= KEYS);
    mask_tail(s, work.kv_length);
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    narrow_weights<T, KEYS>(s, weights);
  }

  // Block `number` of a tile.
  __device__ __forceinline__ void step(int number, bool last, int tail, float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                       uint32_t (&weights)[KEYS / 16][4], RowState& rows, int queries) {
    start_both(s, o, weights, queries, last, number == 1, tail);
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
    if constexpr (SHIFTED) shift_queries(next.slot);
    start_both(s, o, weights, next.slot, next.kv_length <= KEYS, blocks == 1, tail);
    mask_tail(s, next.kv_length);
    const RowState ended = rows;
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    wait_for_output(o);
    narrow_weights<T, KEYS>(s, weights);
    store(o, ended, work);
  }

  // The last values of a tile, alone; in a turn where another tile with a history follows.
  __device__ __forceinline__ void finish(int blocks, int tail, bool in_turn, float (&o)[DIM / 2],
                                         const uint32_t (&weights)[KEYS / 16][4], const RowState& rows,
                                         const Work& work) {
    using namespace hopper;
    if (blocks == 1) clear_tail_of_values(tail);
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    if (in_turn) take_turn();
    wgmma_fence();
    start_output(o, weights, blocks > 1);
    if (in_turn) give_turn();
    wait_for_output(o);
    store(o, rows, work);
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

  // Rounds, and writes out straight from the registers: the four threads of a row exchange their pairs of columns, so
  // that each writes 16 bytes.
  __device__ __forceinline__ void store(float (&o)[DIM / 2], const RowState& rows, const Work& work) {
    const AttentionQueries& queries = params_.queries[work.queries];
    const int quarter = thread_ % 4;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffff'ffff, sum, 1);
      sum += __shfl_xor_sync(0xffff'ffff, sum, 2);
      factor[h] = 1 / sum;
      if (queries.logsumexp != nullptr && quarter == 0 && work.out_row[h] != kNoRow) {
        constexpr float kLn2 = 0.6931471805599453f;
        static_cast<float*>(queries.logsumexp)[work.out_row[h]] = (rows.shift[h] + log2f(sum)) * kLn2;
      }
    }
    if (params_.rows_by_vectors) {
      store_by_vectors(o, factor, work);
    } else {
      store_by_words(o, factor, work);
    }
  }

  // Where this thread's row h goes.
  __device__ __forceinline__ T* out_row(const Work& work, int h) const {
    return static_cast<T*>(params_.queries[work.queries].out) + work.out_row[h] * params_.problem.head_dim;
  }

  // Two neighbouring columns of a row, rounded: of group `i` of 8, those of this thread's quarter.
  static __device__ __forceinline__ uint32_t rounded(const float (&o)[DIM / 2], const float (&factor)[2], int i,
                                                     int h) {
    const float* const from = &o[4 * i + 2 * h];
    return pack<T>(from[0] * factor[h], from[1] * factor[h]);
  }

  __device__ __forceinline__ void store_by_vectors(const float (&o)[DIM / 2], const float (&factor)[2],
                                                   const Work& work) {
    const TargetAttentionProblem& p = params_.problem;
    const int quarter = thread_ % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* const row = out_row(work, h);
#pragma unroll
      for (int i = 0; i < DIM / 32; ++i) {
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pair[j] = rounded(o, factor, 4 * i + j, h);
        transpose_of_four(pair, quarter);
        const int column = 32 * i + 8 * quarter;
        if (work.out_row[h] != kNoRow && column < p.head_dim) {
          *reinterpret_cast<uint4*>(row + column) = uint4{pair[0], pair[1], pair[2], pair[3]};
        }
      }
    }
  }

  // Rows that are not aligned to 16 bytes: the four threads of a row write four words of it that follow each other. In
  // a row that begins in the middle of a word these have the second half of one pair and the first of the next. Each of
  // these loops is one of independent steps: a chain of them would hold up the warp for longer than the stores do.
  __device__ __forceinline__ void store_by_words(const float (&o)[DIM / 2], const float (&factor)[2],
                                                 const Work& work) {
    using namespace hopper;
    constexpr int kGroups = DIM / 8;
    const int quarter = thread_ % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const row = reinterpret_cast<uint16_t*>(out_row(work, h));
      const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(row) >> 1 & 1);
      const int end = work.out_row[h] != kNoRow ? static_cast<int>(params_.problem.head_dim) : 0;
      uint32_t word[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) word[i] = rounded(o, factor, i, h);
      if (__any_sync(0xffff'ffff, odd)) {
        // A row's last element, and the pairs of the thread before; the first one gets the last one's of the group
        // before.
        store_half_if(odd != 0 && quarter == 3 && end == DIM, row + DIM - 1, word[kGroups - 1] >> 16);
        uint32_t lower[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const uint32_t before = i > 0 ? word[i - 1] : 0;
          lower[i] =
              __shfl_sync(0xffff'ffff, quarter == 3 ? before : word[i], thread_ % 32 / 4 * 4 + (quarter + 3) % 4);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          word[i] = odd != 0 ? __funnelshift_r(lower[i], word[i], 16) : word[i];
        }
        store_half_if(odd != 0 && quarter == 0 && end > 0, row, word[0] >> 16);
      }
      uint32_t last = 0;  // a word of which the row has the first element alone
      bool has_last = false;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int column = 8 * i + 2 * quarter - odd;  // of the word
        const bool begins = i > 0 || column >= 0;
        store_word_if(begins && column + 1 < end, row + column, word[i]);
        const bool is_last = begins && column + 1 == end;
        last = is_last ? word[i] : last;
        has_last |= is_last;
      }
      store_half_if(has_last, row + end - 1, last);
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

  // Rows without history, or of a user that does not exist.
  __device__ void fill(const Work& work) {
    const AttentionQueries& queries = params_.queries[work.queries];
    const float value = work.has_user ? 0.0f : quiet_nan<float>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t number = work.out_row[h];
      if (number == kNoRow) continue;
      T* const row = out_row(work, h);
      for (int column = thread_ % 4; column < params_.problem.head_dim; column += 4) row[column] = narrow<T>(value);
      if (queries.logsumexp != nullptr && thread_ % 4 == 0) {
        static_cast<float*>(queries.logsumexp)[number] = work.has_user ? -infinity<float>() : value;
      }
    }
  }

  const AttentionParams& params_;
  Memory& memory_;
  int number_;
  int thread_;  // of the warpgroup
  RingPosition<kTileSlots> tile_;
  HalfPosition<Memory::kHalves> half_;
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
};

}  // namespace ikbo::kernels
