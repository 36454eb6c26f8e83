// Rows of 16-bit elements at any address, brought to and taken from swizzled shared memory by the 32 lanes of a warp: what
// the copy engine cannot address. A panel row is 64 elements in 128 bytes; every lane has one of its 32 words of 4 bytes.
//
// Whole words are copied without waiting. Where a row begins in the middle of a word, or ends in one, a second step mends
// it once the words are there: it needs the row's last element if that shares its word with something else, which one lane
// loads on its own meanwhile. Nothing behind the row is read, and before it at most the other half of the word in which it
// begins, which is dropped.
#pragma once

#include <cstdint>

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/mbarrier.h"

namespace ikbo::kernels {

constexpr int kPanelElements = 64;

struct PanelRow {
  uintptr_t first;  // address
  int count;        // elements of it that exist; 0 and less: none

  __device__ PanelRow(const void* from, int elements)
      : first(reinterpret_cast<uintptr_t>(from)), count(min(elements, kPanelElements)) {}

  __device__ int odd() const { return static_cast<int>(first >> 1 & 1); }  // it begins in the middle of a word
  // From the beginning of the word in which it begins to its end.
  __device__ int halves() const { return count > 0 ? count + odd() : 0; }
  __device__ bool needs_mending() const { return count > 0 && (odd() != 0 || count % 2 != 0); }
  __device__ uintptr_t words() const { return first & ~uintptr_t{3}; }

  // What `mend_row` needs, by any one lane.
  __device__ uint32_t load_last() const {
    return halves() % 2 != 0 ? uint32_t{reinterpret_cast<const uint16_t*>(first)[count - 1]} : 0u;
  }
};

// Where a lane's word of row `row` of a panel lies.
__device__ __forceinline__ uint32_t word_of_panel(uint32_t panel, int row, int lane) {
  return panel + static_cast<uint32_t>(row * 128 + ((lane / 4) ^ (row & 7)) * 16 + lane % 4 * 4);
}

// Starts the copy. What the row does not have is filled with zeros.
__device__ __forceinline__ void start_row(const PanelRow& from, uint32_t panel, int row, int lane) {
  hopper::cp_async_4_or_zeros(word_of_panel(panel, row, lane), from.words() + 4 * lane, lane < from.halves() / 2);
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ void store_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// A lane's word of a row, put right; `last` is what load_last returned.
__device__ __forceinline__ uint32_t mended(const PanelRow& from, uint32_t word, uint32_t last, int lane) {
  const int place_of_last = from.halves() % 2 != 0 ? from.halves() / 2 : -1;
  word = lane == place_of_last ? last : word;
  const uint32_t next = __shfl_down_sync(0xffff'ffff, word, 1);
  const uint32_t behind = lane < 31 ? next : place_of_last == 32 ? last : 0u;
  return from.odd() != 0 ? word >> 16 | behind << 16 : word;
}

// The other way: writes the first `count` elements of a panel row to any address.
__device__ __forceinline__ void write_row(uint32_t panel, int row, void* to, int count, int lane) {
  const uint32_t word = load_word(word_of_panel(panel, row, lane));
  auto* const out = static_cast<uint16_t*>(to);
  const uint32_t next = __shfl_down_sync(0xffff'ffff, word, 1);
  const bool odd = (reinterpret_cast<uintptr_t>(to) & 2) != 0;
  if (odd && lane == 0 && count > 0) out[0] = static_cast<uint16_t>(word);
  const uint32_t pair = odd ? word >> 16 | next << 16 : word;
  const int first = 2 * lane + (odd ? 1 : 0);
  const int end = min(count, kPanelElements);
  if (first + 1 < end) {
    *reinterpret_cast<uint32_t*>(out + first) = pair;
  } else if (first < end) {
    out[first] = static_cast<uint16_t>(pair);
  }
}

}  // namespace ikbo::kernels
