// Rows of 16-bit elements taken from swizzled shared memory to any address by the 32 lanes of a warp: what the copy
// engine cannot address. A panel row is 64 elements in 128 bytes; every lane has one of its 32 words of 4 bytes.
#pragma once

#include <cstdint>

namespace ikbo::kernels {

constexpr int kPanelElements = 64;

// Writes the first `count` elements of ROWS rows of a panel, `step` apart from `first` on; row r goes to to + r *
// stride. Where a row of `to` begins in the middle of a word, a lane writes the second half of its own word and the
// first of the next. Several rows at a time, so that what one waits for, the others do as well.
template <int ROWS>
__device__ __forceinline__ void write_panel_rows(uint32_t panel, int first, int step, int rows, uint16_t* to,
                                                 int64_t stride, int count, int lane) {
  uint32_t word[ROWS];
  uint32_t next[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + i * step;
    const uint32_t address = panel + static_cast<uint32_t>(row * 128 + ((lane / 4) ^ (row & 7)) * 16 + lane % 4 * 4);
    word[i] = 0;
    if (row < rows) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[i]) : "r"(address) : "memory");
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) next[i] = __shfl_down_sync(0xffff'ffff, word[i], 1);
  const int end = min(count, kPanelElements);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + i * step;
    if (row >= rows) continue;
    uint16_t* const out = to + row * stride;
    const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(out) >> 1 & 1);
    const uint32_t pair = odd != 0 ? word[i] >> 16 | next[i] << 16 : word[i];
    const int column = 2 * lane + odd;
    if (column + 1 < end) {
      *reinterpret_cast<uint32_t*>(out + column) = pair;
    } else if (column < end) {
      out[column] = static_cast<uint16_t>(pair);
    }
    if (odd != 0 && lane == 0 && end > 0) out[0] = static_cast<uint16_t>(word[i]);
  }
}

}  // namespace ikbo::kernels
