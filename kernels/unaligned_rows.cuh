// Rows of 16-bit elements taken from swizzled shared memory to any address by the 32 lanes of a warp: what the copy
// engine cannot address. A panel row is 64 elements in 128 bytes; every lane has one of its 32 words of 4 bytes.
#pragma once

#include <cstdint>

namespace ikbo::kernels {

constexpr int kPanelElements = 64;

// Two times 16 bytes of shared memory: what any 16 bytes that begin in the first are made of.
struct VectorPair {
  uint32_t word[8];

  __device__ __forceinline__ void load(uint32_t first, uint32_t second) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(first)
                 : "memory");
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[4]), "=r"(word[5]), "=r"(word[6]), "=r"(word[7])
                 : "r"(second)
                 : "memory");
  }

  // The 16 bytes that begin `offset` of them in: an even number below 16.
  __device__ __forceinline__ uint4 at(uint32_t offset) const {
    uint32_t from[6];
    uint32_t w[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) from[i] = (offset & 8) != 0 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = (offset & 4) != 0 ? from[i + 1] : from[i];
    const uint32_t bits = offset * 8;  // of which the shift takes those below 32: 0 or 16
    return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
            __funnelshift_r(w[3], w[4], bits)};
  }
};

// Writes rows of a panel to rows of `to` that begin anywhere: row r, `count` elements of it, goes to to + r * stride.
// Eight lanes a row, sixteen rows a step: a lane's rows then all begin at the same place of 16 bytes, and lie in the
// panel at the same place of its swizzle, so that little is left to do for each. A lane writes whole 16 bytes of the
// destination, and one element of what is left at a row's ends.
class PanelRows {
 public:
  // `thread` of 128. `rows` is at least 1.
  __device__ __forceinline__ PanelRows(uint32_t panel, uint16_t* to, int64_t stride, int count, uint32_t thread)
      : panel_(panel), first_(static_cast<int>(thread / 8)), step_(kStep * stride), out_(to + first_ * stride) {
    const uint32_t i = thread % 8;
    const uint32_t elements = min(count, kPanelElements);
    const uint32_t head = min(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(out_) & 15) / 2, elements);
    const uint32_t vectors = (elements - head) / 8;
    const uint32_t loose = elements - 8 * vectors;
    from_ = head + 8 * i;
    has_vector_ = i < vectors;
    has_loose_ = i < loose;
    loose_ = i < head ? i : i + 8 * vectors;
    has_more_ = i + 8 < loose;  // up to 14, where a row has less than 64 elements
    more_ = i + 8 < head ? i + 8 : i + 8 + 8 * vectors;
  }

  // All rows below `rows`.
  __device__ __forceinline__ void write(int rows) {
    constexpr int kSteps = 4;
#pragma unroll 1
    for (int row = first_; row < rows; row += kSteps * kStep) {
      VectorPair pair[kSteps];
      uint32_t element[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        // In place of a row beyond the last, the last one: the step's other lanes may have some.
        const uint32_t at = panel_ + min(row + i * kStep, rows - 1) * 128;
        pair[i].load(at + swizzled(from_ / 8), at + swizzled(from_ / 8 + 1));
        element[i] = load_element(at, loose_);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (row + i * kStep < rows) {
          if (has_vector_) *reinterpret_cast<uint4*>(out_ + from_) = pair[i].at(from_ % 8 * 2);
          if (has_loose_) out_[loose_] = static_cast<uint16_t>(element[i]);
          if (has_more_) out_[more_] = static_cast<uint16_t>(load_element(panel_ + (row + i * kStep) * 128, more_));
        }
        out_ += step_;
      }
    }
  }

 private:
  static constexpr int kStep = 16;  // a multiple of 8 rows begins at the same place of 16 bytes, and of the swizzle

  __device__ __forceinline__ uint32_t swizzled(uint32_t vector) const {
    return ((vector ^ first_) & 7) * 16;
  }
  __device__ __forceinline__ uint32_t load_element(uint32_t row, uint32_t i) const {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(row + swizzled(i / 8) + i % 8 * 2) : "memory");
    return value;
  }

  uint32_t panel_;
  int first_;
  int64_t step_;
  uint16_t* out_;
  uint32_t from_;   // first element of the lane's vector
  uint32_t loose_;  // the lane's element of the ends
  uint32_t more_;
  bool has_vector_;
  bool has_loose_;
  bool has_more_;
};

}  // namespace ikbo::kernels
