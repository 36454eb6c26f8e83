// Target attention on the matrix unit: a persistent CTA takes tiles of 128 packed query rows of one user and key head.
//
// Four warps bring the data: one draws tiles and copies blocks of keys and values (bulk copies), three gather the query
// rows of the tile after. Two warpgroups of 64 rows each multiply: while one has the matrix unit, the other does its
// softmax, and within a warpgroup the products with the values of one block run beside the softmax of the next.
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
constexpr int kLoaders = 96;
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

// ---- One thread draws tiles and copies keys and values, the last block first: it is the one that is masked.
template <typename T, int DIM, int KEYS>
__device__ void produce(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory) {
  using namespace hopper;
  using Memory = AttentionMemory<T, DIM, KEYS>;
  constexpr uint32_t kBlockBytes = sizeof(memory.k[0]);
  RingPosition<kTileSlots> at;
  RingPosition<kStages> stage;
  const uint32_t tiles = params.workspace.header->tile_count;
  const auto draw = [&] {
    mbarrier_wait(&memory.tile_empty[at.slot], at.parity ^ 1);
    const uint32_t number = atomicAdd(&params.workspace.header->next_tile, 1u);
    const AttentionTile tile = number < tiles ? params.workspace.tiles[number] : AttentionTile{};
    memory.tile[at.slot] = tile;
    mbarrier_arrive(&memory.tile_full[at.slot]);
    at.advance();
    return tile;
  };
  // A tile is drawn before the one in front of it is copied, so that its queries are there in time.
  AttentionTile next = draw();
  while (next.rows > 0) {
    const AttentionTile tile = next;
    next = draw();
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

// ---- Three warps gather the query rows of a tile, wherever their candidates stand.
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
template <int KEYS>
__device__ __forceinline__ void mask_tail(float (&s)[KEYS / 2], int valid) {
  const int column = 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) {
    if (i / 4 * 8 + column + i % 2 >= valid) s[i] = -infinity<float>();
  }
}

// Largest of a thread's two rows over the four threads that share them. NaN is passed over: the sums keep it.
template <int KEYS>
__device__ __forceinline__ void raise_max(const float (&s)[KEYS / 2], float (&row_max)[2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], s[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffff'ffff, row_max[h], 1));
    row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffff'ffff, row_max[h], 2));
  }
}

// s becomes the weights, and their sum is added to the thread's own part of row_sum.
template <int KEYS>
__device__ __forceinline__ void weigh_block(float (&s)[KEYS / 2], const float (&row_max)[2], float (&row_sum)[2],
                                            float scale_log2) {
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) shift[h] = row_max[h] * scale_log2;
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) {
    s[i] = hopper::exp2_approximate(fmaf(s[i], scale_log2, -shift[i / 2 % 2]));
    row_sum[i / 2 % 2] += s[i];
  }
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

 public:
  __device__ Consumer(const AttentionParams& params, Memory& memory, int number)
      : params_(params), memory_(memory), number_(number), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  __device__ void run() {
    using namespace hopper;
    RingPosition<kTileSlots> at;
    // The first turn is the first warpgroup's.
    if (number_ == 1) named_barrier_arrive(kFirstTurn, kConsumers * kWarpgroup);
    while (true) {
      mbarrier_wait(&memory_.tile_full[at.slot], at.parity);
      const AttentionTile tile = memory_.tile[at.slot];
      mbarrier_arrive(&memory_.tile_empty[at.slot]);
      at.advance();
      if (tile.rows == 0) return;
      mbarrier_wait(&memory_.q_full[buffer_.slot], buffer_.parity);
      attend(tile);
      buffer_.advance();
    }
  }

 private:
  __device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], int slot) {
    using namespace hopper;
    const uint32_t q = descriptor_of(&memory_.q[buffer_.slot][0][number_ * 64][0]);
    const uint32_t k = descriptor_of(&memory_.k[slot][0][0][0]);
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      const uint32_t q_offset = descriptor_offset(i / 4 * kQueryPanelBytes + i % 4 * 32);
      const uint32_t k_offset = descriptor_offset(i / 4 * kKeyPanelBytes + i % 4 * 32);
      WgmmaKMajor<T, KEYS>::multiply(s, swizzled_descriptor(q + q_offset), swizzled_descriptor(k + k_offset), i > 0);
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ void start_output(float (&o)[DIM / 2], const uint32_t (&weights)[KEYS / 16][4], int slot,
                                               bool accumulate) {
    using namespace hopper;
    const uint32_t v = panelled_descriptor_of(&memory_.v[slot][0][0][0], kKeyPanelBytes);
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
      WgmmaRegisters<T, DIM>::multiply(o, weights[i], swizzled_descriptor(v + descriptor_offset(i * 16 * 128)),
                                       i > 0 || accumulate);
    }
    wgmma_commit_group();
  }

  // What follows a history is another user's, or was never written: a weight of 0 would not keep its NaN out.
  __device__ void clear_tail_of_values(int slot, int valid) {
    using namespace hopper;
    if (valid == KEYS) return;
    for (int i = thread_; i < kPanels * (KEYS - valid) * 8; i += kWarpgroup) {
      const int row = valid + i / 8 % (KEYS - valid);
      const int panel = i / 8 / (KEYS - valid);
      reinterpret_cast<uint4*>(memory_.v[slot][panel][row])[i % 8] = uint4{0, 0, 0, 0};
    }
    fence_proxy_async_shared();
    named_barrier_sync(kOwn + number_, kWarpgroup);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (thread_ % 32 == 0) hopper::mbarrier_arrive(barrier);
  }

  __device__ void attend(const AttentionTile& tile) {
    using namespace hopper;
    float o[DIM / 2] = {};
    float row_max[2] = {-infinity<float>(), -infinity<float>()};
    float row_sum[2] = {0, 0};
    const int blocks = blocks_of(tile, KEYS);
    if (blocks > 0) {
      float s[KEYS / 2];
      uint32_t weights[KEYS / 16][4];
      const int tail = tile.kv_length - (blocks - 1) * KEYS;
      mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
      wgmma_fence();
      start_scores(s, keys_.slot);
      wgmma_wait_group<0>();
      pin_registers(s);
      release(&memory_.k_empty[keys_.slot]);
      keys_.advance();
      if (tail < KEYS) mask_tail<KEYS>(s, tail);
      raise_max<KEYS>(s, row_max);
      weigh_block<KEYS>(s, row_max, row_sum, params_.scale_log2);
      narrow_weights<T, KEYS>(s, weights);

      for (int block = blocks - 2; block >= 0; --block) {
        mbarrier_wait(&memory_.k_full[keys_.slot], keys_.parity);
        const bool first = block == blocks - 2;
        if (first) {
          mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
          clear_tail_of_values(values_.slot, tail);
        }
        named_barrier_sync(kFirstTurn + number_, kConsumers * kWarpgroup);
        wgmma_fence();
        start_scores(s, keys_.slot);
        if (!first) mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
        start_output(o, weights, values_.slot, !first);
        named_barrier_arrive(kFirstTurn + (number_ ^ 1), kConsumers * kWarpgroup);
        wgmma_wait_group<1>();
        pin_registers(s);
        release(&memory_.k_empty[keys_.slot]);
        keys_.advance();
        const float before[2] = {row_max[0], row_max[1]};
        raise_max<KEYS>(s, row_max);
        float correction[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Equal infinities too.
          correction[h] =
              before[h] == row_max[h] ? 1.0f : hopper::exp2_approximate((before[h] - row_max[h]) * params_.scale_log2);
          row_sum[h] *= correction[h];
        }
        weigh_block<KEYS>(s, row_max, row_sum, params_.scale_log2);
        wgmma_wait_group<0>();
        pin_registers(o);
        release(&memory_.v_empty[values_.slot]);
        values_.advance();
        narrow_weights<T, KEYS>(s, weights);
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
      }
      mbarrier_wait(&memory_.v_full[values_.slot], values_.parity);
      if (blocks == 1) clear_tail_of_values(values_.slot, tail);
      wgmma_fence();
      start_output(o, weights, values_.slot, blocks > 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[h] += __shfl_xor_sync(0xffff'ffff, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(0xffff'ffff, row_sum[h], 2);
      }
      wgmma_wait_group<0>();
      pin_registers(o);
      release(&memory_.v_empty[values_.slot]);
      values_.advance();
    }
    store(tile, o, row_max, row_sum);
  }

  // Rounds, and writes whole rows through the place where this warpgroup's queries were.
  __device__ void store(const AttentionTile& tile, float (&o)[DIM / 2], const float (&row_max)[2],
                        const float (&row_sum)[2]) {
    using namespace hopper;
    const TargetAttentionProblem& p = params_.problem;
    const int lane = thread_ % 32;
    const int own_row = number_ * 64 + thread_ / 32 * 16 + lane / 4;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = tile.user < 0 ? quiet_nan<float>() : (tile.kv_length > 0 ? 1 / row_sum[h] : 0.0f);
      const int64_t number = memory_.out_row[buffer_.slot][own_row + 8 * h];
      if (p.logsumexp != nullptr && lane % 4 == 0 && number >= 0) {
        const float value = row_max[h] * static_cast<float>(p.scale) + logf(row_sum[h]);
        static_cast<float*>(p.logsumexp)[number] =
            tile.user < 0 ? quiet_nan<float>() : (tile.kv_length > 0 ? value : -infinity<float>());
      }
    }
    named_barrier_sync(kOwn + number_, kWarpgroup);  // all have read their queries
#pragma unroll
    for (int i = 0; i < DIM / 4; ++i) {
      const int row = own_row + 8 * (i % 2);
      const int chunk = i / 2;  // 8 columns
      const uint32_t pair = pack<T>(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2]);
      auto* const place = reinterpret_cast<unsigned char*>(memory_.q[buffer_.slot][chunk / 8][row]);
      *reinterpret_cast<uint32_t*>(place + ((chunk % 8) ^ (row & 7)) * 16 + lane % 4 * 4) = pair;
    }
    named_barrier_sync(kOwn + number_, kWarpgroup);
    constexpr int kChunksOfRow = DIM / 8;
#pragma unroll 4
    for (int i = thread_; i < 64 * kChunksOfRow; i += kWarpgroup) {
      const int row = number_ * 64 + i / kChunksOfRow;
      const int chunk = i % kChunksOfRow;
      const int64_t number = memory_.out_row[buffer_.slot][row];
      if (number < 0 || chunk * 8 >= p.head_dim) continue;
      const uint4 held = *reinterpret_cast<const uint4*>(
          reinterpret_cast<const unsigned char*>(memory_.q[buffer_.slot][chunk / 8][row]) +
          ((chunk % 8) ^ (row & 7)) * 16);
      T* const to = static_cast<T*>(p.out) + number * p.head_dim + chunk * 8;
      if (params_.rows_by_vectors) {
        *reinterpret_cast<uint4*>(to) = held;
      } else {
        const T* const elements = reinterpret_cast<const T*>(&held);
        for (int e = 0; e < 8 && chunk * 8 + e < p.head_dim; ++e) to[e] = elements[e];
      }
    }
    mbarrier_arrive(&memory_.q_empty[buffer_.slot]);
  }

  const AttentionParams& params_;
  Memory& memory_;
  int number_;
  int thread_;  // of the warpgroup
  RingPosition<Memory::kQueryBuffers> buffer_;
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
      mbarrier_init(&memory.tile_empty[i], kLoaders + kConsumerThreads);
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
    } else if (threadIdx.x >= 32) {
      gather_queries<T, DIM, KEYS>(params, memory, static_cast<int>(threadIdx.x) - 32);
    }
  } else {
    register_increase<232>();
    Consumer<T, DIM, KEYS>(params, memory, warpgroup - 1).run();
  }
}

}  // namespace ikbo::kernels
