// Results of a warpgroup's 64 rows on their way out of its registers, in the tensor-core kernel of target attention. A
// thread has pairs of neighbouring columns of two rows, 8 apart; a quarter of four threads has a row.
#pragma once

#include "kernels/hopper/store_if.h"
#include "kernels/target_attention_params.h"
#include "kernels/target_attention_softmax.cuh"

namespace ikbo::kernels {

// Four 8x8 matrices of 16-bit elements, of which lane i has elements 2 (i % 4) and the next of row i / 4: lanes 8 i to
// 8 i + 7 give the addresses of the 16-byte rows of matrix i.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ inline void stmatrix_x4(uint32_t address, uint32_t matrix0, uint32_t matrix1, uint32_t matrix2,
                                   uint32_t matrix3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrix0),
               "r"(matrix1), "r"(matrix2), "r"(matrix3)
               : "memory");
}

// Where a thread's rows go, and whether they are any.
template <typename T>
struct ResultRows {
  T* row[2];
  bool exists[2];
  int head_dim;
};

template <typename T, int DIM>
class Results {
 public:
  // `factor`: of a thread's rows.
  __device__ __forceinline__ Results(const float (&o)[DIM / 2], const float (&factor)[2], int thread)
      : o_(o), factor_(factor), lane_(thread % 32), quarter_(thread % 4) {}

  // Straight from the registers: the four threads of a row exchange their pairs of columns, so that each writes 16
  // bytes.
  __device__ __forceinline__ void store_by_vectors(const ResultRows<T>& to) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < DIM / 32; ++i) {
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pair[j] = rounded(4 * i + j, h);
        transpose_of_four(pair);
        const int column = 32 * i + 8 * quarter_;
        if (to.exists[h] && column < to.head_dim) {
          *reinterpret_cast<uint4*>(to.row[h] + column) = uint4{pair[0], pair[1], pair[2], pair[3]};
        }
      }
    }
  }

  // Rows that are not aligned to 16 bytes: the four threads of a row write four words of it that follow each other. In
  // a row that begins in the middle of a word these have the second half of one pair and the first of the next. Each of
  // these loops is one of independent steps: a chain of them would hold up the warp for longer than the stores do.
  __device__ __forceinline__ void store_by_words(const ResultRows<T>& to) const {
    using namespace hopper;
    constexpr int kGroups = DIM / 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const row = reinterpret_cast<uint16_t*>(to.row[h]);
      const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(row) >> 1 & 1);
      const int end = to.exists[h] ? to.head_dim : 0;
      uint32_t word[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) word[i] = rounded(i, h);
      if (__any_sync(0xffff'ffff, odd)) {
        // A row's last element, and the pairs of the thread before; the first one gets the last one's of the group
        // before.
        store_half_if(odd != 0 && quarter_ == 3 && end == DIM, row + DIM - 1, word[kGroups - 1] >> 16);
        uint32_t lower[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const uint32_t before = i > 0 ? word[i - 1] : 0;
          lower[i] = __shfl_sync(0xffff'ffff, quarter_ == 3 ? before : word[i], lane_ / 4 * 4 + (quarter_ + 3) % 4);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          word[i] = odd != 0 ? __funnelshift_r(lower[i], word[i], 16) : word[i];
        }
        store_half_if(odd != 0 && quarter_ == 0 && end > 0, row, word[0] >> 16);
      }
      uint32_t last = 0;  // a word of which the row has the first element alone
      bool has_last = false;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int column = 8 * i + 2 * quarter_ - odd;  // of the word
        const bool begins = i > 0 || column >= 0;
        store_word_if(begins && column + 1 < end, row + column, word[i]);
        const bool is_last = begins && column + 1 == end;
        last = is_last ? word[i] : last;
        has_last |= is_last;
      }
      store_half_if(has_last, row + end - 1, last);
    }
  }

  // The warp's 16 rows to shared memory, in panels of 64 columns, PANEL_BYTES apart, swizzled as the copy engine does.
  template <uint32_t PANEL_BYTES>
  __device__ __forceinline__ void stage(uint32_t first_row) const {
    // Of two matrices of 8 x 8 by two, this lane says where a row of one lies.
    const uint32_t to = first_row + lane_ % kWarpRows * 128 + (lane_ / kWarpRows ^ lane_ % 8) * 16;
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 2) {
      stmatrix_x4((to ^ i % 8 * 16) + i / 8 * PANEL_BYTES, rounded(i, 0), rounded(i, 1), rounded(i + 1, 0),
                  rounded(i + 1, 1));
    }
  }

  // The same of eight rows: those of each thread's row h.
  template <uint32_t PANEL_BYTES>
  __device__ __forceinline__ void stage_eight(uint32_t first_row, int h) const {
    const uint32_t to = first_row + lane_ % 8 * 128 + (lane_ / 8 ^ lane_ % 8) * 16;
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 4) {
      stmatrix_x4((to ^ i % 8 * 16) + i / 8 * PANEL_BYTES, rounded(i, h), rounded(i + 1, h), rounded(i + 2, h),
                  rounded(i + 3, h));
    }
  }

 private:
  // Two neighbouring columns of a row, rounded: of group `i` of 8, those of this thread's quarter.
  __device__ __forceinline__ uint32_t rounded(int i, int h) const {
    const float* const from = &o_[4 * i + 2 * h];
    return pack<T>(from[0] * factor_[h], from[1] * factor_[h]);
  }

  // pair[j] of thread i becomes pair[i] of thread j, among four neighbours.
  __device__ __forceinline__ void transpose_of_four(uint32_t (&pair)[4]) const {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = (quarter_ & distance) != 0;
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

  const float (&o_)[DIM / 2];
  const float (&factor_)[2];
  int lane_;
  int quarter_;
};

}  // namespace ikbo::kernels
