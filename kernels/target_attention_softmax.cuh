// The softmax of a warpgroup's 64 rows of the tensor-core kernel of target attention. A thread has two of them, 8
// apart.
#pragma once

#include "kernels/hopper/exp2.h"
#include "kernels/hopper/wgmma.h"

namespace ikbo::kernels {

// The largest or smallest of a block read as integers, for a thread's two rows, over the four threads that share them:
// there is an instruction that takes three.
template <int KEYS, bool LARGEST>
__device__ __forceinline__ void extreme_of_block(const float (&s)[KEYS / 2], int (&extreme)[2]) {
  const auto of_three = [](int a, int b, int c) { return LARGEST ? __vimax3_s32(a, b, c) : __vimin3_s32(a, b, c); };
  const auto of_two = [](int a, int b) { return LARGEST ? max(a, b) : min(a, b); };
  int part[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    part[c] = of_two(__float_as_int(s[c]), __float_as_int(s[c + 4]));
#pragma unroll
    for (int i = 8 + c; i + 4 < KEYS / 2; i += 8) {
      part[c] = of_three(part[c], __float_as_int(s[i]), __float_as_int(s[i + 4]));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    extreme[h] = of_two(part[2 * h], part[2 * h + 1]);
    extreme[h] = of_two(extreme[h], __shfl_xor_sync(0xffff'ffff, extreme[h], 1));
    extreme[h] = of_two(extreme[h], __shfl_xor_sync(0xffff'ffff, extreme[h], 2));
  }
}

// Largest of a block, for a thread's two rows. Non-negative floats are in the order of integers, and above all negative
// ones, which are in the opposite order. A NaN is passed over or is the largest: the sums keep it.
template <int KEYS>
__device__ __forceinline__ void max_of_block(const float (&s)[KEYS / 2], float (&largest)[2]) {
  static_assert(KEYS % 16 == 0);
  int extreme[2];
  extreme_of_block<KEYS, true>(s, extreme);
  if (__any_sync(0xffff'ffff, (extreme[0] | extreme[1]) < 0)) {
    int lowest[2];
    extreme_of_block<KEYS, false>(s, lowest);
#pragma unroll
    for (int h = 0; h < 2; ++h) extreme[h] = extreme[h] < 0 ? lowest[h] : extreme[h];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) largest[h] = __int_as_float(extreme[h]);
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

}  // namespace ikbo::kernels
