// Rows of queries brought to shared memory by one warp: 32 of them, of which lane r knows where row r is (0: a row of
// zeros), to `place(row, vector)`, where 16 bytes of a row belong.
#pragma once

#include "kernels/hopper/cp_async.h"
#include "kernels/hopper/mbarrier.h"

namespace ikbo::kernels {

constexpr int kHalvesOfVector = 8;

// Rows that begin at multiples of 16 bytes. They are on their way on return: cp_async_wait_all.
struct AlignedRows {
  int columns;
  const void* anything;  // an address of which nothing is read
};
template <int DIM, typename Place>
__device__ __forceinline__ void gather_aligned_rows(const AlignedRows& rows, uint64_t address, Place&& place) {
  constexpr int kVectors = DIM / kHalvesOfVector;
  constexpr int kRowsAtATime = 32 / kVectors;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vector = lane % kVectors;
  const int bytes = 2 * min(max(rows.columns - vector * kHalvesOfVector, 0), kHalvesOfVector);
#pragma unroll 4
  for (int first = 0; first < 32; first += kRowsAtATime) {
    const int number = first + lane / kVectors;
    const auto row = __shfl_sync(0xffff'ffff, address, number);
    const bool reads = row != 0 && bytes > 0;
    const void* const from = reinterpret_cast<const uint16_t*>(row) + vector * kHalvesOfVector;
    hopper::cp_async_16(hopper::shared_address(place(number, vector)), reads ? from : rows.anything, reads ? bytes : 0);
  }
}

// ---- Rows at any address: the vectors of 16 bytes that hold a row are loaded, and shifted to where it begins.
struct UnalignedRows {
  int columns;
  const void* end;  // nothing is read from there on
};

__device__ __forceinline__ const uint16_t* vector_that_holds(uint64_t address) {
  return reinterpret_cast<const uint16_t*>(address & ~uint64_t{15});
}

// The vector at `from`, of which only what lies in front of `end` is read.
__device__ __forceinline__ uint4 vector_before(const uint16_t* from, const void* end) {
  const auto* const last = static_cast<const uint16_t*>(end);
  if (from + kHalvesOfVector <= last) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = from + 2 * i < last ? from[2 * i] : 0;
    if (from + 2 * i + 1 < last) words[i] |= static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Elements [first, first + 8) of two vectors that follow each other, those from `count` on as zeros.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, uint32_t first, int count) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if ((first & 4) != 0) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if ((first & 2) != 0) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = __funnelshift_r(words[i], words[i + 1], 16 * (first & 1));
    words[i] = 2 * i + 1 < count ? words[i] : (2 * i < count ? words[i] & 0xffff : 0);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Brings a row closer before anybody needs it.
__device__ __forceinline__ void prefetch_row(uint64_t address, int columns) {
  if (address == 0) return;
  for (uint64_t line = address; line < address + 2 * columns; line += 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// All but a row's last vector by as many lanes as it has vectors, each with its neighbour's; the last one by one lane a
// row.
template <int DIM, typename Place>
__device__ __forceinline__ void gather_unaligned_rows(const UnalignedRows& rows, uint64_t address, Place&& place) {
  constexpr int kVectors = DIM / kHalvesOfVector;
  constexpr int kRowsAtATime = 32 / kVectors;
  constexpr int kBatch = 4;  // rows of a lane on their way
  static_assert(kVectors <= 32 && 32 % (kRowsAtATime * kBatch) == 0);
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const int vector = lane % kVectors;
  const auto halves_before = [](uint64_t of) { return static_cast<uint32_t>(of) / 2 % kHalvesOfVector; };
#pragma unroll 1
  for (int first = 0; first < 32; first += kRowsAtATime * kBatch) {
    uint4 own[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint64_t row = __shfl_sync(0xffff'ffff, address, first + i * kRowsAtATime + lane / kVectors);
      const uint16_t* const from = vector_that_holds(row) + vector * kHalvesOfVector;
      own[i] = uint4{};
      if (row != 0 && reinterpret_cast<uint64_t>(from) < row + 2 * rows.columns) {
        own[i] = vector_before(from, rows.end);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int number = first + i * kRowsAtATime + lane / kVectors;
      const uint32_t row = __shfl_sync(0xffff'ffff, static_cast<uint32_t>(address), number);
      const uint4 next{__shfl_down_sync(0xffff'ffff, own[i].x, 1), __shfl_down_sync(0xffff'ffff, own[i].y, 1),
                       __shfl_down_sync(0xffff'ffff, own[i].z, 1), __shfl_down_sync(0xffff'ffff, own[i].w, 1)};
      if (vector < kVectors - 1) {
        *place(number, vector) = shifted(own[i], next, halves_before(row), rows.columns - vector * kHalvesOfVector);
      }
    }
  }
  const uint16_t* const from = vector_that_holds(address) + (kVectors - 1) * kHalvesOfVector;
  const uint64_t end = address + 2 * rows.columns;
  const auto load = [&](const uint16_t* at) {
    return address != 0 && reinterpret_cast<uint64_t>(at) < end ? vector_before(at, rows.end) : uint4{};
  };
  *place(lane, kVectors - 1) = shifted(load(from), load(from + kHalvesOfVector), halves_before(address),
                                       rows.columns - (kVectors - 1) * kHalvesOfVector);
}

}  // namespace ikbo::kernels
