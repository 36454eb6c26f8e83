// Stores that are made or left out without a branch, of which many would follow each other. Nothing that the caller
// reads may lie there: the compiler is not told.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
#pragma once

#include <cstdint>

namespace ikbo::hopper {

__device__ inline void store_word_if(bool condition, uint16_t* to, uint32_t value) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.b32 [%1], %2;}" ::"r"(static_cast<uint32_t>(condition)),
      "l"(to), "r"(value));
}

// The lower 16 bits.
__device__ inline void store_half_if(bool condition, uint16_t* to, uint32_t value) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.b16 [%1], %2;}" ::"r"(static_cast<uint32_t>(condition)),
      "l"(to), "h"(static_cast<uint16_t>(value)));
}

}  // namespace ikbo::hopper
