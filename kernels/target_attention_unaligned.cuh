// Rows of queries and results that begin anywhere, in the tensor-core kernel of target attention. Queries come in the
// 16 bytes in which they lie, by the copy engine where boxes have several rows, and whoever multiplies moves them.
// Results pass through shared memory, so that whole 16 bytes of the destination are written at a time.
#pragma once

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/tensor_copy.h"
#include "kernels/row_windows.h"
#include "kernels/target_attention_loaders.cuh"
#include "kernels/target_attention_memory.cuh"
#include "kernels/target_attention_packed.cuh"
#include "kernels/unaligned_rows.cuh"

namespace ikbo::kernels {

// Vector `vector` of the 16 bytes in which the row at `query` lies, if there is one.
template <typename T>
__device__ __forceinline__ void copy_vector_of_row(const AttentionParams& params, T* to, const T* query, int vector,
                                                   const T* end) {
  constexpr int kBytes = kVector * sizeof(T);
  const auto row = reinterpret_cast<uint64_t>(query);
  const int shift = static_cast<int>(row % kBytes);
  const int row_bytes = static_cast<int>(params.problem.head_dim) * static_cast<int>(sizeof(T));
  const int bytes = query != nullptr ? min(max(shift + row_bytes - vector * kBytes, 0), kBytes) : 0;
  const T* const from = reinterpret_cast<const T*>(row - shift) + vector * kVector;
  if (bytes > 0 && from + kVector > end) {
    for (int e = 0; e < kVector; ++e) to[e] = e * static_cast<int>(sizeof(T)) < bytes ? from[e] : T(0.0f);
  } else {
    hopper::cp_async_16(hopper::shared_address(to), bytes > 0 ? from : static_cast<const T*>(params.problem.k), bytes);
  }
}

// Rows i * 32 to i * 32 + 31 of a half, of which every lane knows one, null where there is none, but for what comes
// behind their places. Behind `end` there may be no memory.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void copy_vectors_of_rows(const AttentionParams& params,
                                                     AttentionMemory<T, DIM, KEYS>& memory, int slot, int i,
                                                     const T* query, const T* end) {
  using Lanes = QueryLanes<DIM>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % Lanes::kLanesOfRow;
#pragma unroll 4
  for (int j = 0; j < 32; j += Lanes::kRowsAtATime) {
    const int from = j + lane / Lanes::kLanesOfRow;
    const int row = i * 32 + from;
    const uint64_t address = __shfl_sync(0xffff'ffff, reinterpret_cast<uint64_t>(query), from);
    copy_vector_of_row(params, &memory.q[slot][chunk / kVector][row][(chunk % kVector ^ row % kVector) * kVector],
                       reinterpret_cast<const T*>(address), chunk, end);
  }
}

// What comes behind the place of row `row` of a half, and how far the row is to be moved.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void copy_rest_of_row(const AttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory,
                                                 int slot, int row, const T* query, const T* end) {
  memory.q_shift[slot][row] = static_cast<uint8_t>(reinterpret_cast<uint64_t>(query) / sizeof(T) % kVector);
  copy_vector_of_row(params, memory.q_rest[slot][row], query, DIM / kVector, end);
}

// The row at `query` that is row `row` of a half, and those that are in its box, one after the other.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void load_box_of_rows(const RowWindows& windows, AttentionMemory<T, DIM, KEYS>& memory,
                                                 const T* query, int slot, int row, uint64_t* barrier) {
  static_assert(kBoxColumns == kPanel);
  const WindowPlace place = place_in_windows(windows, reinterpret_cast<uint64_t>(query));
#pragma unroll
  for (int panel = 0; panel < AttentionMemory<T, DIM, KEYS>::kPanels; ++panel) {
    hopper::tensor_load_4d(memory.q[slot][panel][row], place.map, barrier, panel * kPanel, 0, place.window, place.slab);
  }
}

// By a warpgroup, before it multiplies: moves its rows to where they belong, two threads of a warp a row. Eight lanes
// that follow each other have eight rows, which lie in different banks.
template <typename T, int DIM, int KEYS>
__device__ __forceinline__ void shift_queries(AttentionMemory<T, DIM, KEYS>& memory, int slot, int thread) {
  constexpr int kVectors = DIM / 16;  // of a thread
  constexpr int kAtATime = kVectors < 8 ? kVectors : 8;
  constexpr int kWords = 4 * kAtATime;
  const int row = thread / 32 * kWarpRows + thread % kWarpRows;
  const int shift = memory.q_shift[slot][row];
  if (!__any_sync(0xffff'ffff, shift != 0)) return;
  const bool is_last = thread % 32 >= kWarpRows;
  const int first = is_last ? kVectors : 0;
  const auto vector = [&](int at) {
    return reinterpret_cast<uint4*>(memory.q[slot][at / kVector][row]) + (at % kVector ^ row % kVector);
  };
  // The other thread of the row moves this one.
  const uint4 behind = is_last ? *reinterpret_cast<const uint4*>(memory.q_rest[slot][row]) : *vector(kVectors);
  __syncwarp();
#pragma unroll
  for (int from = 0; from < kVectors; from += kAtATime) {
    uint32_t word[kWords + 4];
#pragma unroll
    for (int i = 0; i <= kAtATime; ++i) {
      const uint4 read = from + i < kVectors ? *vector(first + from + i) : behind;
      word[4 * i] = read.x, word[4 * i + 1] = read.y, word[4 * i + 2] = read.z, word[4 * i + 3] = read.w;
    }
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) word[i] = (shift & 4) != 0 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) word[i] = (shift & 2) != 0 ? word[i + 1] : word[i];
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], (shift & 1) * 16);
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      *vector(first + from + i) = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
    }
  }
}

// Eight rows of results on their way from shared memory, where they lie in panels of eight rows by 64 elements from
// `from` on, swizzled as the copy engine does: lane 4 r + i of a warp knows where row r goes, null if it is none.
template <int DIM, uint32_t PANEL_BYTES>
class UnalignedRows {
 public:
  __device__ __forceinline__ UnalignedRows(uint32_t from, uint64_t to, int head_dim)
      : lane_(static_cast<int>(threadIdx.x) % 32), from_(from), to_(to), head_(head_of(to)), head_dim_(head_dim) {}

  __device__ __forceinline__ void write() const {
    write_vectors();
    write_ends();
  }

 private:
  static constexpr int kVectors = DIM / kVector;  // of a row, a lane each
  static constexpr int kRowsOfStep = 32 / kVectors;
  static constexpr int kSteps = 8 / kRowsOfStep;
  static constexpr int kLoads = kSteps < 4 ? kSteps : 4;  // in flight

  // Elements of a row before a multiple of 16 bytes.
  static __device__ __forceinline__ int head_of(uint64_t to) { return static_cast<int>(-(to / 2) % kVector); }

  __device__ __forceinline__ uint32_t address_of(int row, int vector) const {
    return from_ + vector / 8 * PANEL_BYTES + row * 128 + (vector ^ row) % 8 * 16;
  }

  // All of 16 bytes that are a row's alone, as many elements behind the vectors of shared memory as come before them.
  // In the boxes in which queries come all eight rows begin alike, so that the steps of a shift are often nobody's.
  __device__ __forceinline__ void write_vectors() const {
    const bool has_four = __any_sync(0xffff'ffff, (head_ & 4) != 0);
    const bool has_two = __any_sync(0xffff'ffff, (head_ & 2) != 0);
    const bool has_one = __any_sync(0xffff'ffff, (head_ & 1) != 0);
    const int vector = lane_ % kVectors;
    const int next = min(vector + 1, kVectors - 1);  // behind the last there is none, and none is needed
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kLoads) {
      VectorPair pair[kLoads];
      uint64_t to[kLoads];
      int head[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = (step + i) * kRowsOfStep + lane_ / kVectors;
        pair[i].load(address_of(row, vector), address_of(row, next));
        to[i] = __shfl_sync(0xffff'ffff, to_, 4 * row);
        head[i] = head_of(to[i]);
      }
      if (has_four) shift<6, 2>(pair, head, 4);
      if (has_two) shift<5, 1>(pair, head, 2);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        uint32_t* const word = pair[i].word;
        if (has_one) {
#pragma unroll
          for (int j = 0; j < 4; ++j) word[j] = __funnelshift_r(word[j], word[j + 1], (head[i] & 1) * 16);
        }
        const int element = kVector * vector + head[i];
        if (to[i] != 0 && element + kVector <= head_dim_) {
          *reinterpret_cast<uint4*>(to[i] + 2 * element) = uint4{word[0], word[1], word[2], word[3]};
        }
      }
    }
  }

  // Words [0, COUNT) become those WORDS behind where the row's head has this bit.
  template <int COUNT, int WORDS>
  static __device__ __forceinline__ void shift(VectorPair (&pair)[kLoads], const int (&head)[kLoads], int bit) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        pair[i].word[j] = (head[i] & bit) != 0 ? pair[i].word[j + WORDS] : pair[i].word[j];
      }
    }
  }

  // What is left at a row's ends, at most seven elements each: those in front are the last of 16 bytes, those behind
  // the first, so 2, 4 and 8 bytes of them begin at multiples of these.
  __device__ __forceinline__ void write_ends() const {
    const int row = lane_ / 4;
    const bool in_front = lane_ % 4 == 0;
    if (to_ == 0 || lane_ % 4 >= 2) return;
    if (head_dim_ < kVector) return write_elements(row, lane_ % 4);
    const int tail = (head_dim_ - head_) % kVector;
    const int count = in_front ? head_ : tail;
    const int vector = in_front ? 0 : (head_dim_ - tail) / kVector;
    VectorPair pair;
    pair.load(address_of(row, vector), address_of(row, in_front ? 0 : min(vector + 1, kVectors - 1)));
    const uint4 value = pair.at(2 * head_);
    const uint64_t to = to_ + 2 * (in_front ? head_ - kVector : head_dim_ - tail);
    const auto word = [&](int i) {
      return (i & 2) != 0 ? ((i & 1) != 0 ? value.w : value.z) : ((i & 1) != 0 ? value.y : value.x);
    };
    if ((count & 4) != 0) {
      *reinterpret_cast<uint2*>(to + (in_front ? 8 : 0)) = in_front ? uint2{value.z, value.w} : uint2{value.x, value.y};
    }
    if ((count & 2) != 0) {
      const int at = in_front ? 3 - (count & 4) / 2 : (count & 4) / 2;
      *reinterpret_cast<uint32_t*>(to + 4 * at) = word(at);
    }
    if ((count & 1) != 0) {
      const int at = in_front ? kVector - count : count - 1;
      *reinterpret_cast<uint16_t*>(to + 2 * at) = static_cast<uint16_t>(word(at / 2) >> at % 2 * 16);
    }
  }

  // Every second element of a row that may have no end of 16 bytes within.
  __device__ __forceinline__ void write_elements(int row, int first) const {
    for (int e = first; e < head_dim_; e += 2) {
      uint16_t element;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(element) : "r"(address_of(row, 0) + 2 * e) : "memory");
      reinterpret_cast<uint16_t*>(to_)[e] = element;
    }
  }

  int lane_;
  uint32_t from_;
  uint64_t to_;
  int head_;
  int head_dim_;
};

// The warps that gather queries, each the 64 rows of a warpgroup, where rows begin anywhere.
template <typename T, int DIM, int KEYS>
__device__ void gather_unaligned_queries(const UnalignedAttentionParams& params, AttentionMemory<T, DIM, KEYS>& memory,
                                         int number) {
  using namespace hopper;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kTileSlots> at;
  HalfPosition<AttentionMemory<T, DIM, KEYS>::kHalves> half(number);
  bool is_first = true;
  const auto candidate_at = [&](uint32_t i) { return memory.candidate_at(params, i); };
  while (true) {
    mbarrier_wait(&memory.tile_full[at.slot], at.parity);
    const AttentionTile tile = memory.tile[at.slot];
    if (tile.rows == 0) return;
    const bool is_target = tile.queries == kTarget;
    const int first = number * kHalfRows;
    const bool reads_any = tile.kv_length > 0 && first < tile.rows;
    const int piece_bits = is_target ? params.queries[kTarget].piece_bits : params.queries[kSelf].piece_bits;
    const int box_bits = is_target ? params.queries[kTarget].box_bits : params.queries[kSelf].box_bits;
    // Which of the tile's rows are the lane's rows of the half, and where, while the buffer is perhaps still in use.
    int tile_row[2];
    PackedPlace place[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile_row[i] = first + row_in_boxes(i * 32 + lane, piece_bits, box_bits);
      place[i] = place_packed_row(params, candidate_at, tile, tile_row[i]);
    }
    const auto row_of = [&](int i) { return packed_row_at<T>(params, tile, tile_row[i], place[i]); };
    uint64_t* const full = &memory.q_full[number][at.slot];
    mbarrier_wait(&memory.q_empty[half.slot], half.parity ^ 1);
    const bool by_engine = box_bits > 0;
    if (reads_any && by_engine) {
      const RowWindows& windows = params.q_rows;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const T* const query = row_of(i).query;
        const bool begins_box = (lane & ((1 << box_bits) - 1)) == 0;
        if (begins_box && query != nullptr) {
          load_box_of_rows(windows, memory, query, half.slot, i * 32 + lane, full);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PackedRow<T> row = row_of(i);
      memory.out_row[half.slot][i * 32 + lane] = row.out_row;
      if (!reads_any) continue;
      const auto* const end =
          static_cast<const T*>(is_target ? params.queries[kTarget].end : params.queries[kSelf].end);
      if (!by_engine) copy_vectors_of_rows(params, memory, half.slot, i, row.query, end);
      copy_rest_of_row(params, memory, half.slot, i * 32 + lane, row.query, end);
    }
    if (is_first && lane == 0) mbarrier_arrive(&memory.q_requested);
    is_first = false;
    if (reads_any) {
      cp_async_wait_all();
      fence_proxy_async_shared();
    }
    if (reads_any && by_engine && lane == 0) {
      mbarrier_arrive_expect_bytes(full, static_cast<uint32_t>(min(tile.rows - first, kHalfRows)) * DIM * sizeof(T));
    } else {
      mbarrier_arrive(full);
    }
    mbarrier_arrive(&memory.tile_empty[at.slot]);
    half.advance();
    at.advance();
  }
}

}  // namespace ikbo::kernels
