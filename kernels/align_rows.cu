#include <algorithm>

#include "kernels/align_rows.h"
#include "kernels/scalars.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kVectorBytes = 16;

// Division of numbers below 2^31 by a multiplication.
struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  int shift = 0;

  Divider() = default;
  explicit Divider(int64_t by) : divisor(static_cast<uint32_t>(by)) {
    int log = 0;
    while ((int64_t{1} << log) < by) ++log;
    shift = 31 + log;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  __device__ uint32_t divide(uint32_t number) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(number) * multiplier >> shift);
  }
};

struct Job {
  AlignRows rows;
  Divider vectors_of_row, inner, middle;
  unsigned first_block, blocks;
};

struct Params {
  Job jobs[kMostInOneLaunch];
  int count;
};

// Elements [first, first + 8) of a row of 16-bit ones, which may begin in the middle of a word of 4 bytes.
__device__ __forceinline__ uint4 vector_of_halves(const uint16_t* row, int64_t columns, int64_t first) {
  const uint16_t* const from = row + first;
  const auto left = static_cast<int>(columns - first < 9 ? columns - first : 9);  // elements from here on
  uint32_t word[4];
  if ((reinterpret_cast<uintptr_t>(from) & 2) == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = 2 * i + 1 < left ? reinterpret_cast<const uint32_t*>(from)[i] : 2 * i < left ? from[2 * i] : 0;
    }
  } else {
    // Whole words hold elements 2 i - 1 and 2 i. The first half of the first is another row's, or of this one.
    uint32_t whole[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      whole[i] = 2 * i < left ? reinterpret_cast<const uint32_t*>(from - 1)[i] : 2 * i - 1 < left ? from[2 * i - 1] : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = whole[i] >> 16 | whole[i + 1] << 16;
  }
  return {word[0], word[1], word[2], word[3]};
}

// The same of elements of `words` words each.
__device__ __forceinline__ uint4 vector_of_words(const uint32_t* row, int64_t words_of_row, int64_t first) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = first + i < words_of_row ? row[first + i] : 0;
  return {word[0], word[1], word[2], word[3]};
}

// A vector of 16 bytes a thread. SMALL: vectors can be counted in 31 bits.
template <bool SMALL>
__global__ void align_rows_kernel(const __grid_constant__ Params params) {
  int number = 0;
  while (number + 1 < params.count && blockIdx.x >= params.jobs[number + 1].first_block) ++number;
  const Job& job = params.jobs[number];
  const AlignRows& rows = job.rows;
  const int64_t vectors_of_row = job.vectors_of_row.divisor;
  const int64_t vectors = rows.to_rows * vectors_of_row;
  const int64_t existing = rows.sizes[0] * rows.sizes[1] * rows.sizes[2];
  const auto divide = [](int64_t number, const Divider& by) {
    return SMALL ? static_cast<int64_t>(by.divide(static_cast<uint32_t>(number))) : number / by.divisor;
  };
  for (int64_t vector = int64_t{blockIdx.x - job.first_block} * kThreads + threadIdx.x; vector < vectors;
       vector += int64_t{job.blocks} * kThreads) {
    const int64_t row = divide(vector, job.vectors_of_row);
    const int64_t at = vector - row * vectors_of_row;
    uint4 value{};
    int64_t to_row = row;
    if (row < existing) {
      const int64_t outer = divide(row, job.inner);
      const int64_t k = row - outer * rows.sizes[2];
      to_row = outer * rows.to_outer_rows + k;
      const int64_t i = divide(outer, job.middle);
      const int64_t j = outer - i * rows.sizes[1];
      const int64_t offset = i * rows.strides[0] + j * rows.strides[1] + k * rows.strides[2];
      const char* const from = static_cast<const char*>(rows.from) + offset * rows.element_bytes;
      value = rows.element_bytes == 2 ? vector_of_halves(reinterpret_cast<const uint16_t*>(from), rows.columns, at * 8)
                                      : vector_of_words(reinterpret_cast<const uint32_t*>(from),
                                                        rows.columns * rows.element_bytes / 4, at * 4);
    }
    static_cast<uint4*>(rows.to)[to_row * vectors_of_row + at] = value;
  }
}

void launch(const AlignRows* jobs, size_t count, cudaStream_t stream) {
  Params params{};
  int64_t most = 0;
  unsigned blocks = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t vectors_of_row = jobs[i].to_columns * jobs[i].element_bytes / kVectorBytes;
    const int64_t vectors = jobs[i].to_rows * vectors_of_row;
    if (vectors == 0) continue;
    constexpr int64_t kMostBlocks = 65'536;
    const auto own = static_cast<unsigned>(std::min((vectors + kThreads - 1) / kThreads, kMostBlocks));
    params.jobs[params.count++] = {jobs[i],
                                   Divider(vectors_of_row),
                                   Divider(std::max<int64_t>(jobs[i].sizes[2], 1)),
                                   Divider(std::max<int64_t>(jobs[i].sizes[1], 1)),
                                   blocks,
                                   own};
    AlignRows& rows = params.jobs[params.count - 1].rows;
    if (rows.to_outer_rows == 0) rows.to_outer_rows = rows.sizes[2];
    blocks += own;
    most = std::max(most, vectors);
  }
  if (blocks == 0) return;
  if (most < INT32_MAX) {
    align_rows_kernel<true><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    align_rows_kernel<false><<<blocks, kThreads, 0, stream>>>(params);
  }
  check_launch("align_rows");
}

}  // namespace

void align_rows(const std::vector<AlignRows>& jobs, cudaStream_t stream) {
  for (size_t first = 0; first < jobs.size(); first += kMostInOneLaunch) {
    launch(jobs.data() + first, std::min(jobs.size() - first, kMostInOneLaunch), stream);
  }
}

}  // namespace ikbo::kernels
