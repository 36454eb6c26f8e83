// Rows of 16-bit elements that begin at any of them, for the copy engine. A tensor map's address and strides, and where
// a box begins in a row, are multiples of 16 bytes (a box that begins elsewhere is an illegal instruction). So memory
// from the last multiple of 16 bytes on is mapped as windows that begin every 16 bytes and overlap, and the row is read
// that begins `shift` elements behind a window's beginning, with these before it. In a map of windows that end where
// such rows do, what is behind them is read as zero and may be no memory.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "kernels/hopper/tensor_map.h"

namespace ikbo::kernels {

constexpr int kWindowStep = 8;   // elements
constexpr int kSlabBits = 30;    // a slab has so many windows, as a power of two: coordinates have 31 bits
constexpr int kBoxColumns = 64;  // elements of a row in a box: 128 bytes, swizzled

struct RowWindows {
  CUtensorMap map[kWindowStep];  // by shift; (slabs, windows, rows of a box, shift + size)
  uint64_t begin;                // of the first window
};

// What is known of the rows: `first` is the one that begins lowest in memory; `span`, the elements from there to where
// the last one begins; each begins a multiple of `step` elements, 1, 2, 4 or 8, behind the first.
struct RowsAnywhere {
  const void* first;
  int64_t span;
  int64_t step;
  int64_t size;        // elements of a row
  int box_rows;        // that are read at once, each
  int64_t box_stride;  // elements behind the one before: a multiple of 8
  bool is_fp16;
};

inline RowWindows row_windows(const RowsAnywhere& rows, const char* name) {
  constexpr int64_t kSlab = int64_t{1} << kSlabBits;
  const auto address = reinterpret_cast<uint64_t>(rows.first);
  const auto before = static_cast<int64_t>(address % 16 / 2);
  const int64_t windows = (before + rows.span) / kWindowStep + 1;
  RowWindows result{};
  result.begin = address - address % 16;
  for (int64_t shift = before % rows.step; shift < kWindowStep; shift += rows.step) {
    result.map[shift] = hopper::tensor_map_16_bit(
        reinterpret_cast<const void*>(result.begin), rows.is_fp16,
        {shift + rows.size, rows.box_rows, std::min(windows, kSlab), (windows + kSlab - 1) / kSlab},
        {rows.box_stride, kWindowStep, kSlab * kWindowStep}, {kBoxColumns, rows.box_rows, 1, 1}, name);
  }
  return result;
}

// Where the copy engine finds the row at `address`.
struct WindowPlace {
  const CUtensorMap* map;
  int shift, window, slab;
};

__device__ inline WindowPlace place_in_windows(const RowWindows& windows, uint64_t address) {
  const uint64_t window = (address - windows.begin) / (2 * kWindowStep);
  const int shift = static_cast<int>(address / 2 % kWindowStep);
  return {&windows.map[shift], shift, static_cast<int>(window % (uint64_t{1} << kSlabBits)),
          static_cast<int>(window >> kSlabBits)};
}

}  // namespace ikbo::kernels
