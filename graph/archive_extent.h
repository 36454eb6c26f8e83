#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace ikbo::graph {

/// Bytes of storage that a strided tensor's elements reach (0 for a tensor without elements); nothing where that, or
/// the number of its elements, does not fit 64 bits. All arguments are at least 0, `strides` as long as `sizes`.
inline std::optional<std::uint64_t> bytes_reached(const std::vector<std::int64_t>& sizes,
                                                  const std::vector<std::int64_t>& strides, std::int64_t offset,
                                                  std::int64_t element_bytes) {
  std::int64_t count = element_bytes;
  std::int64_t last = offset;
  bool overflow = false;
  bool empty = false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    empty = empty || sizes[i] == 0;
    std::int64_t step = 0;
    overflow = __builtin_mul_overflow(std::max<std::int64_t>(sizes[i], 1), count, &count) || overflow;
    overflow = __builtin_mul_overflow(std::max<std::int64_t>(sizes[i] - 1, 0), strides[i], &step) || overflow;
    overflow = __builtin_add_overflow(last, step, &last) || overflow;
  }
  std::int64_t end = 0;
  overflow = __builtin_add_overflow(last, 1, &end) || overflow;
  overflow = __builtin_mul_overflow(end, element_bytes, &end) || overflow;
  if (overflow) return std::nullopt;
  return empty ? 0 : static_cast<std::uint64_t>(end);
}

}  // namespace ikbo::graph
