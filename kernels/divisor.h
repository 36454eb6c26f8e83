// Division by a number that the host knows, without the instructions of a division.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ikbo::kernels {

// Divides numbers below 2^31 by one of 1 to 2^31 - 1.
struct Divisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
  __host__ __device__ uint32_t quotient(uint32_t number) const {
    return divisor == 1 ? number : static_cast<uint32_t>((static_cast<uint64_t>(number) * multiplier >> 32) >> shift);
  }
};

// With l the bits of divisor - 1, the multiplier is 2^(31 + l) / divisor rounded up. That is less than 2^32 and exact
// for numbers below 2^31: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994,
// theorem 4.2.
inline Divisor divisor_of(int64_t divisor) {
  uint32_t bits = 0;
  while ((int64_t{1} << bits) < divisor) ++bits;
  if (bits == 0) return {1, 0, 0};
  const uint64_t power = uint64_t{1} << (31 + bits);
  const auto by = static_cast<uint64_t>(divisor);
  return {static_cast<uint32_t>(by), static_cast<uint32_t>((power + by - 1) / by), bits - 1};
}

}  // namespace ikbo::kernels
