// The warpgroups of the tensor-core kernel of target attention that multiply.
#pragma once

#include "kernels/hopper/sync.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_results.cuh"
#include "kernels/target_attention_rows.cuh"
#include "kernels/target_attention_softmax.cuh"
#include "kernels/target_attention_unaligned.cuh"

namespace ikbo::kernels {

// ---- A warpgroup that multiplies.
template <typename T, int DIM, int KEYS, RowPath PATH>
class Consumer {
  using Memory = KernelMemory<T, DIM, KEYS, PATH>;
  using Params = KernelParams<PATH>;
  static constexpr int kPanels = Memory::kPanels;
  static constexpr uint32_t kQueryPanelBytes = kHalfRows * 128;
  static constexpr uint32_t kKeyPanelBytes = KEYS * 128;
  static constexpr uint32_t kFirstTurn = 2;  // names of the barriers by which the warpgroups take turns
  static constexpr uint32_t kOwn = 4;        // and of those within one
  static constexpr bool kUnaligned = PATH == RowPath::kUnaligned;
  static constexpr bool kStaged = PATH == RowPath::kStaged;
  static_assert(!kStaged || Memory::kChains, "the next tile's queries have a place of their own");
  // Whether unaligned results lie where the tile's queries were before they are written out.
  static constexpr bool kQueriesMakeRoom = kUnaligned && !Memory::kChains;

  struct Work {
    bool has_rows = false;  // else there is no more
    bool has_user = false;
    bool multiplies = false;  // whether any row is in this warpgroup's half, and there is a history
    int kv_length = 0;
    int slot = 0;     // of its half in shared memory
    int queries = 0;  // which these are
    uint32_t out_row[2] = {kNoRow, kNoRow};
    bool is_staged = false;  // whether its results leave by way of its half
  };

  // What of a tile's results is known before these are there.
  struct Ending {
    float factor[2];  // of a thread's rows
  };

 public:
  __device__ Consumer(const Params& params, Memory& memory, int number)
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
      if (!work.has_rows) break;
      begin(work, s, weights, rows);
      for (bool chained = true; chained;) {
        const int blocks = (work.kv_length + KEYS - 1) / KEYS;
        const int tail = work.kv_length - (blocks - 1) * KEYS;
        Work next;
        for (int i = 1; i < blocks; ++i) {
          const bool last = i + 1 == blocks;
          step(i, last, tail, s, o, weights, rows, work, [&] {
            if (kStaged && last) next = take_work();
          });
        }
        if constexpr (Memory::kChains) {
          if (!kStaged || blocks == 1) next = take_work();
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
    give_half_back();
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

  // Makes rows of queries that began anywhere what the products expect.
  __device__ __forceinline__ void align_queries(int slot) {
    if constexpr (kUnaligned) {
      shift_queries(memory_, slot, thread_);
      hopper::fence_proxy_async_shared();
      hopper::named_barrier_sync(kOwn + number_, kWarpgroup);
    }
  }

  // The half of the tile that ended last, once its results have left it.
  __device__ __forceinline__ void give_half_back() {
    if constexpr (kStaged) {
      if (ended_ < 0) return;
      hopper::bulk_wait_group_read<0>();
      __syncwarp();
      hopper::mbarrier_arrive(&memory_.q_empty[ended_]);
      ended_ = -1;
    }
  }

  // The next tile, once its queries are there.
  __device__ Work take_work() {
    using namespace hopper;
    give_half_back();
    mbarrier_wait(&memory_.tile_full[tile_.slot], tile_.parity);
    const AttentionTile& tile = memory_.tile[tile_.slot];
    const bool multiplies = tile.rows > number_ * kHalfRows && tile.kv_length > 0;
    Work work{tile.rows > 0, tile.user >= 0, multiplies, tile.kv_length, half_.slot, tile.queries};
    work.is_staged = kStaged && tile.kv_length > kLeastStagedBlocks * KEYS && queries_of(work).out_piece_bits >= 0;
    if (work.has_rows) {
      mbarrier_wait(&memory_.q_full[number_][tile_.slot], tile_.parity);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        work.out_row[h] = memory_.out_row[work.slot][thread_ / 32 * kWarpRows + thread_ % 32 / 4 + 8 * h];
      }
      if (!multiplies) mbarrier_arrive(&memory_.q_empty[work.slot]);
      half_.advance();
    }
    mbarrier_arrive(&memory_.tile_empty[tile_.slot]);
    tile_.advance();
    return work;
  }

  __device__ __forceinline__ void wait_for_scores(float (&s)[KEYS / 2], bool output_runs, const Work& work, bool last) {
    using namespace hopper;
    if (output_runs) {
      wgmma_wait_group<1>();
    } else {
      wgmma_wait_group<0>();
    }
    pin_registers(s);
    release(&memory_.k_empty[keys_.slot]);
    // These were the last scores of the tile.
    if (last && !kQueriesMakeRoom && !(kStaged && work.is_staged)) hopper::mbarrier_arrive(&memory_.q_empty[work.slot]);
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
  // turn. `meanwhile` is done while the scores are waited for.
  template <typename Meanwhile>
  __device__ __forceinline__ void start_both(float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                             const uint32_t (&weights)[KEYS / 16][4], const Work& work, bool last,
                                             bool first_values, int tail, Meanwhile&& meanwhile) {
    using namespace hopper;
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    if (first_values) clear_tail_of_values(tail);
    take_turn();
    wgmma_fence();
    start_scores(s, work.slot);
    mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
    start_output(o, weights, !first_values);
    meanwhile();
    wait_for_scores(s, true, work, last);
    give_turn();
  }

  // A tile's first block, the one that is masked, alone.
  __device__ __forceinline__ void begin(const Work& work, float (&s)[KEYS / 2], uint32_t (&weights)[KEYS / 16][4],
                                        RowState& rows) {
    using namespace hopper;
    align_queries(work.slot);
    mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
    wgmma_fence();
    start_scores(s, work.slot);
    wait_for_scores(s, false, work, work.kv_length <= KEYS);
    mask_tail(s, work.kv_length);
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    narrow_weights<T, KEYS>(s, weights);
  }

  // Block `number` of a tile.
  template <typename Meanwhile>
  __device__ __forceinline__ void step(int number, bool last, int tail, float (&s)[KEYS / 2], float (&o)[DIM / 2],
                                       uint32_t (&weights)[KEYS / 16][4], RowState& rows, const Work& work,
                                       Meanwhile&& meanwhile) {
    start_both(s, o, weights, work, last, number == 1, tail, meanwhile);
    if (number == 1) give_half_back();
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
    align_queries(next.slot);
    Ending ending;
    start_both(s, o, weights, next, next.kv_length <= KEYS, blocks == 1, tail, [&] {
      if (kStaged) ending = end_rows(rows, work);
    });
    mask_tail(s, next.kv_length);
    const RowState ended = rows;
    weigh_first_block<KEYS>(s, rows, params_.scale_log2);
    wait_for_output(o);
    narrow_weights<T, KEYS>(s, weights);
    if (!kStaged) ending = end_rows(ended, work);
    // The products of the other warps have read their queries, in whose place results may go.
    if (kStaged) hopper::named_barrier_sync(kOwn + number_, kWarpgroup);
    store(o, ending, work, kStaged && work.is_staged);
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
    const Ending ending = end_rows(rows, work);
    wait_for_output(o);
    if (kStaged && work.is_staged) mbarrier_arrive(&memory_.q_empty[work.slot]);
    store(o, ending, work, false);
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

  __device__ __forceinline__ const AttentionQueries& queries_of(const Work& work) const {
    // An index that is only known at run time would load each value when it is wanted.
    return work.queries == kTarget ? params_.queries[kTarget] : params_.queries[kSelf];
  }

  __device__ __forceinline__ Ending end_rows(const RowState& rows, const Work& work) {
    void* const logsumexp = kStaged ? queries_of(work).logsumexp : params_.queries[work.queries].logsumexp;
    Ending ending;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffff'ffff, sum, 1);
      sum += __shfl_xor_sync(0xffff'ffff, sum, 2);
      ending.factor[h] = 1 / sum;
      if (logsumexp != nullptr && thread_ % 4 == 0 && work.out_row[h] != kNoRow) {
        constexpr float kLn2 = 0.6931471805599453f;
        static_cast<float*>(logsumexp)[work.out_row[h]] = (rows.shift[h] + log2f(sum)) * kLn2;
      }
    }
    return ending;
  }

  // Rounds and writes out.
  __device__ __forceinline__ void store(const float (&o)[DIM / 2], const Ending& ending, const Work& work,
                                        bool is_staged) {
    const Results<T, DIM> results(o, ending.factor, thread_);
    if constexpr (kStaged) {
      if (is_staged) ended_ = work.slot;
      // The last of the warp's rows.
      if (is_staged && __shfl_sync(0xffff'ffff, work.out_row[1], 31) != kNoRow) {
        store_by_engine(results, work);
        return;
      }
    }
    if constexpr (kUnaligned) {
      store_unaligned(results, work);
    } else {
      const ResultRows<T> to{{out_row(work, 0), out_row(work, 1)},
                             {work.out_row[0] != kNoRow, work.out_row[1] != kNoRow},
                             static_cast<int>(params_.problem.head_dim)};
      if (params_.rows_by_vectors) {
        results.store_by_vectors(to);
      } else {
        results.store_by_words(to);
      }
    }
  }

  // By way of the place of the warp's queries, in boxes of neighbouring rows.
  __device__ __forceinline__ void store_by_engine(const Results<T, DIM>& results, const Work& work) {
    using namespace hopper;
    const int lane = thread_ % 32;
    const int first = thread_ / 32 * kWarpRows;
    auto* const half = memory_.q[work.slot];
    results.template stage<kQueryPanelBytes>(shared_address(&half[0][first][0]));
    fence_proxy_async_shared();
    __syncwarp();
    const int piece_bits = queries_of(work).out_piece_bits;
    if (lane < kWarpRows >> piece_bits) {
      const int row = first + (lane << piece_bits);
      const uint32_t number = memory_.out_row[work.slot][row];
      const uint32_t query = params_.q_heads.quotient(number);
      const auto head = static_cast<int>(number - query * params_.q_heads.divisor);
      const CUtensorMap* const map = work.queries == kTarget ? &params_.out[kTarget] : &params_.out[kSelf];
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        tensor_store_3d(map, &half[panel][row][0], panel * kPanel, head, static_cast<int>(query));
      }
      bulk_commit_group();
    }
  }

  // Rows that begin anywhere: eight of the warp at a time go to shared memory, and from there to where they belong.
  __device__ __forceinline__ void store_unaligned(const Results<T, DIM>& results, const Work& work) {
    using namespace hopper;
    const int warp = thread_ / 32;
    // The products of the other warps have read their queries.
    if constexpr (kQueriesMakeRoom) named_barrier_sync(kOwn + number_, kWarpgroup);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr uint32_t kPanelBytes = kQueriesMakeRoom ? kQueryPanelBytes : 8 * 128;
      uint32_t rows = 0;
      if constexpr (kQueriesMakeRoom) {
        rows = shared_address(memory_.q[work.slot][0][warp * kWarpRows + h * 8]);
      } else {
        rows = shared_address(memory_.results[number_ * 4 + warp]);
        __syncwarp();  // those before are read
      }
      results.template stage_eight<kPanelBytes>(rows, h);
      __syncwarp();
      const uint64_t row = work.out_row[h] != kNoRow ? reinterpret_cast<uint64_t>(out_row(work, h)) : 0;
      UnalignedRows<DIM, kPanelBytes>(rows, row, static_cast<int>(params_.problem.head_dim)).write();
    }
    if constexpr (kQueriesMakeRoom) {
      fence_proxy_async_shared();
      mbarrier_arrive(&memory_.q_empty[work.slot]);
    }
  }

  // Where this thread's row h goes.
  __device__ __forceinline__ T* out_row(const Work& work, int h) const {
    return static_cast<T*>(params_.queries[work.queries].out) + work.out_row[h] * params_.problem.head_dim;
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

  const Params& params_;
  Memory& memory_;
  int number_;
  int thread_;  // of the warpgroup
  RingPosition<kTileSlots> tile_;
  HalfPosition<Memory::kHalves> half_;
  int ended_ = -1;  // slot of the half by way of which results are leaving
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
};

}  // namespace ikbo::kernels
