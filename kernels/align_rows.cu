#include <algorithm>

#include "kernels/align_rows.h"
#include "kernels/divisor.h"
#include "kernels/hopper/launch.h"
#include "kernels/hopper/sync.h"
#include "kernels/scalars.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 2;  // vectors of a thread, all of them on their way at once
constexpr int64_t kVectorBytes = 16;

// A group of threads copies a chunk: kPieces vectors a thread of one row of `to`, so that what is the same for all of
// them is computed once.
struct Job {
  const char* from;
  const char* end;  // of what `from` has
  uint4* to;
  int64_t existing;     // rows of `from`
  int64_t row_bytes;    // of `from`
  int64_t row_vectors;  // of `to`
  int64_t chunks;       // of all rows
  int64_t strides[3];   // bytes
  int64_t sizes[2];     // the two inner ones
  int64_t to_outer_rows;
  Divisor chunks_of_row, inner, middle;
  bool flat;      // all rows of `from` are strides[2] apart, and those of `to` follow each other
  int lanes_log;  // the logarithm of a group's threads
  unsigned first_block;
};

struct Params {
  Job jobs[kMostInOneLaunch];
  int count;
};

// Bytes [shift, shift + 16) of two vectors. `shift` is even and below 16.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, uint32_t shift) {
  const uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t near[6];
  uint32_t from[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) near[i] = (shift & 8) != 0 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) from[i] = (shift & 4) != 0 ? near[i + 1] : near[i];
  const uint32_t bits = shift * 8;  // of which the instruction takes those below 32: 0 or 16
  return {__funnelshift_r(from[0], from[1], bits), __funnelshift_r(from[1], from[2], bits),
          __funnelshift_r(from[2], from[3], bits), __funnelshift_r(from[3], from[4], bits)};
}

// The first `bytes` of a vector, an even number, and zeros.
__device__ __forceinline__ uint4 beginning(uint4 vector, int bytes) {
  const auto kept = [bytes](uint32_t word, int at) { return bytes >= at + 4 ? word : bytes > at ? word & 0xffff : 0; };
  return {kept(vector.x, 0), kept(vector.y, 4), kept(vector.z, 8), kept(vector.w, 12)};
}

// The same of 16 bytes of which the others may not be read.
__device__ __forceinline__ uint4 read_by_halves(const char* from, int bytes) {
  const auto* const half = reinterpret_cast<const uint16_t*>(from);
  const auto word = [&](int at) {
    const uint32_t low = at < bytes ? half[at / 2] : 0;
    return at + 2 < bytes ? low | static_cast<uint32_t>(half[at / 2 + 1]) << 16 : low;
  };
  return {word(0), word(4), word(8), word(12)};
}

template <typename Index>
__device__ __forceinline__ Index divide(Index number, const Divisor& by) {
  if constexpr (sizeof(Index) == 4) {
    return by.quotient(number);
  } else {
    return number / by.divisor;
  }
}

// A thread's vectors, `step` bytes apart. The other numbers say in how many bytes from the first one on a vector begins
// that
struct Place {
  const char* from;
  char* to;
  int step;
  int existing;  // has elements in `from`,
  int readable;  // can be read as the two aligned ones around it, which no other tensor is part of,
  int wanted;    // is one of the row of `to`.
};

// Index: what rows and chunks are counted in.
template <typename Index>
__device__ __forceinline__ Place locate(const Job& job, Index chunk, int lane) {
  constexpr int64_t kMany = 1 << 20;  // more than a thread has
  const auto capped = [](int64_t bytes) { return static_cast<int>(min(bytes, kMany)); };
  const Index row = divide(chunk, job.chunks_of_row);
  const Index chunk_of_row = chunk - row * static_cast<Index>(job.chunks_of_row.divisor);
  const int64_t vector = (int64_t{chunk_of_row} * kPieces << job.lanes_log) + lane;
  const bool exists = row < static_cast<Index>(job.existing);
  const char* from = job.from + vector * kVectorBytes;
  int64_t to_row = row;
  if (job.flat || !exists) {
    from += row * job.strides[2];
  } else {
    const Index outer = divide(row, job.inner);
    const Index i = divide(outer, job.middle);
    const Index j = outer - i * static_cast<Index>(job.sizes[0]);
    const Index k = row - outer * static_cast<Index>(job.sizes[1]);
    from += i * job.strides[0] + j * job.strides[1] + k * job.strides[2];
    to_row = outer * job.to_outer_rows + k;
  }
  const char* const aligned = from - reinterpret_cast<uintptr_t>(from) % kVectorBytes;
  return {.from = from,
          .to = reinterpret_cast<char*>(job.to + to_row * job.row_vectors + vector),
          .step = static_cast<int>(kVectorBytes) << job.lanes_log,
          .existing = exists ? capped(job.row_bytes - vector * kVectorBytes) : 0,
          .readable = capped(job.end - aligned - 2 * kVectorBytes + 1),
          .wanted = capped((job.row_vectors - vector) * kVectorBytes)};
}

// `begin`: of what may be read.
__device__ __forceinline__ void copy(const Place& place, const char* begin) {
  const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(place.from) % kVectorBytes);
  const char* const aligned = place.from - shift;
  uint4 low[kPieces];
  uint4 high[kPieces];
  bool whole[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int at = p * place.step;
    whole[p] = at < min(place.existing, place.readable) && (p > 0 || aligned >= begin);
    if (whole[p]) {
      low[p] = reinterpret_cast<const uint4*>(aligned + at)[0];
      high[p] = reinterpret_cast<const uint4*>(aligned + at)[1];
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int at = p * place.step;
    const int bytes = place.existing - at;
    if (at >= place.wanted) break;
    uint4 value{};
    if (whole[p]) {
      value = shifted(low[p], high[p], shift);
      if (bytes < kVectorBytes) value = beginning(value, bytes);
    } else if (bytes > 0) {
      value = read_by_halves(place.from + at, bytes);
    }
    *reinterpret_cast<uint4*>(place.to + at) = value;
  }
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) align_rows_kernel(const __grid_constant__ Params params) {
  hopper::grid_dependency_launch();
  int number = 0;
  while (number + 1 < params.count && blockIdx.x >= params.jobs[number + 1].first_block) ++number;
  const Job& job = params.jobs[number];
  const Index chunk = (static_cast<Index>(blockIdx.x - job.first_block) * kThreads + threadIdx.x) >> job.lanes_log;
  const bool exists = chunk < static_cast<Index>(job.chunks);
  // Computed while the launch before this one ends.
  const Place place = locate<Index>(job, chunk, static_cast<int>(threadIdx.x) & ((1 << job.lanes_log) - 1));
  hopper::grid_dependency_wait();
  if (exists) copy(place, job.from);
}

// How many threads, their logarithm, share a chunk: those that leave the least of a row's last chunk empty, of these
// the most.
int lanes_log(int64_t row_vectors) {
  int best = 2;
  int64_t fewest = INT64_MAX;
  for (int log = 2; log <= 5; ++log) {
    const int64_t chunk = int64_t{kPieces} << log;
    const int64_t places = (row_vectors + chunk - 1) / chunk * chunk;
    if (places <= fewest) {
      fewest = places;
      best = log;
    }
  }
  return best;
}

// The same with dimensions that continue one another made one.
AlignRows merged(AlignRows rows) {
  const bool dense = rows.to_outer_rows == 0 || rows.to_outer_rows == rows.sizes[2];
  const auto merge = [&rows](int outer) {
    if (rows.sizes[outer] != 1 && rows.strides[outer] != rows.sizes[outer + 1] * rows.strides[outer + 1]) return;
    rows.sizes[outer + 1] *= rows.sizes[outer];
    rows.sizes[outer] = 1;
  };
  merge(0);
  if (dense) {
    merge(1);
    rows.to_outer_rows = rows.sizes[2];
  }
  return rows;
}

Job make_job(const AlignRows& given, unsigned first_block) {
  const AlignRows rows = merged(given);
  const int64_t bytes = rows.element_bytes;
  int64_t last = rows.columns;  // elements from the first of the first row to the end of the last row
  for (int d = 0; d < 3; ++d) last += (rows.sizes[d] - 1) * rows.strides[d];
  const int64_t row_vectors = rows.to_columns * bytes / kVectorBytes;
  const int log = lanes_log(row_vectors);
  const int64_t chunk = int64_t{kPieces} << log;
  const int64_t chunks_of_row = (row_vectors + chunk - 1) / chunk;
  const auto* const from = static_cast<const char*>(rows.from);
  return {.from = from,
          .end = from + last * bytes,
          .to = static_cast<uint4*>(rows.to),
          .existing = rows.sizes[0] * rows.sizes[1] * rows.sizes[2],
          .row_bytes = rows.columns * bytes,
          .row_vectors = row_vectors,
          .chunks = rows.to_rows * chunks_of_row,
          .strides = {rows.strides[0] * bytes, rows.strides[1] * bytes, rows.strides[2] * bytes},
          .sizes = {rows.sizes[1], rows.sizes[2]},
          .to_outer_rows = rows.to_outer_rows,
          .chunks_of_row = divisor_of(chunks_of_row),
          .inner = divisor_of(std::max<int64_t>(rows.sizes[2], 1)),
          .middle = divisor_of(std::max<int64_t>(rows.sizes[1], 1)),
          .flat = rows.sizes[0] * rows.sizes[1] == 1,
          .lanes_log = log,
          .first_block = first_block};
}

void launch(const AlignRows* jobs, size_t count, cudaStream_t stream) {
  Params params{};
  unsigned blocks = 0;  // fewer than a grid can have: they copy 8 KB each
  bool small = true;
  for (size_t i = 0; i < count; ++i) {
    if (jobs[i].to_rows * jobs[i].to_columns == 0) continue;
    const Job job = make_job(jobs[i], blocks);
    // The threads of the last block count, too.
    small = small && std::max((job.chunks << job.lanes_log) + kThreads, job.existing) < INT32_MAX;
    blocks += static_cast<unsigned>(((job.chunks << job.lanes_log) + kThreads - 1) / kThreads);
    params.jobs[params.count++] = job;
  }
  if (blocks == 0) return;
  const auto kernel = small ? align_rows_kernel<uint32_t> : align_rows_kernel<int64_t>;
  hopper::launch_early(kernel, blocks, kThreads, 0, stream, params);
  check_launch("align_rows");
}

}  // namespace

void align_rows(const std::vector<AlignRows>& jobs, cudaStream_t stream) {
  for (size_t first = 0; first < jobs.size(); first += kMostInOneLaunch) {
    launch(jobs.data() + first, std::min(jobs.size() - first, kMostInOneLaunch), stream);
  }
}

}  // namespace ikbo::kernels
