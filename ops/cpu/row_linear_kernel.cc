// Compiled once for each instruction set (CPU_CAPABILITY names it), as PyTorch compiles its own CPU kernels, so that
// one library runs anywhere and uses what the machine has.
#include "ops/cpu/row_linear_kernel.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>

namespace ikbo::cpu::CPU_CAPABILITY {
namespace {

template <typename Acc>
using Vec = at::vec::Vectorized<Acc>;

// 6 rows by 4 vectors take 24 accumulators, 4 columns and one broadcast of the 32 registers of AVX-512, and 6 row
// pointers fit the general registers; with 16 registers two vectors are the most.
constexpr int kTileRows = 6;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kPanelVectors = 4;
#else
constexpr int kPanelVectors = 2;
#endif
// Sums are folded this often over K. A block of a panel (32 KiB) then stays in the first-level cache for all rows of a
// chunk, and the rounding error of a long chain, which grows with its length, is kept down.
constexpr int64_t kFold = 128;

template <typename Acc>
constexpr int64_t kVector = Vec<Acc>::size();
template <typename Acc>
constexpr int64_t kPanel = kPanelVectors* kVector<Acc>;
static_assert(kPanel<float> <= kMaxPanelColumns, "a tile row must fit its buffer");
static_assert(kPanelVectors % 2 == 0, "16-bit results are written from pairs of float vectors");

// A matrix in memory: rows of contiguous elements.
template <typename Acc>
struct Rows {
  Acc* data;
  int64_t stride;

  Acc* row(int64_t r) const { return data + r * stride; }
};

// sums (ROWS, VECS vectors) [+]= x (ROWS, depth) · panel (depth, VECS vectors)
template <typename Acc, int ROWS, int VECS>
void multiply(const Acc* x, int64_t x_row_stride, int64_t depth, Rows<const Acc> panel, bool add, Rows<Acc> sums) {
  const Acc* row[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) row[r] = x + r * x_row_stride;
  Vec<Acc> sum[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) sum[r][v] = Vec<Acc>(Acc(0));
  }
  for (int64_t i = 0; i < depth; ++i) {
    Vec<Acc> column[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) column[v] = Vec<Acc>::loadu(panel.row(i) + v * kVector<Acc>);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Vec<Acc> value(row[r][i]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sum[r][v] = at::vec::fmadd(value, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
      Acc* to = sums.row(r) + v * kVector<Acc>;
      (add ? Vec<Acc>::loadu(to) + sum[r][v] : sum[r][v]).store(to);
    }
  }
}

template <typename Acc, int ROWS>
void multiply_columns(const Acc* x, int64_t x_row_stride, int64_t depth, Rows<const Acc> panel, int64_t vectors,
                      bool add, Rows<Acc> sums) {
  if (vectors == 1) return multiply<Acc, ROWS, 1>(x, x_row_stride, depth, panel, add, sums);
  if (vectors == 2) return multiply<Acc, ROWS, 2>(x, x_row_stride, depth, panel, add, sums);
#if defined(CPU_CAPABILITY_AVX512)
  if (vectors == 3) return multiply<Acc, ROWS, 3>(x, x_row_stride, depth, panel, add, sums);
  if (vectors == 4) return multiply<Acc, ROWS, 4>(x, x_row_stride, depth, panel, add, sums);
#endif
}

// Up to this many columns a panel would be mostly zeros: elements are scalar products then. Which way a job takes
// depends on its number of columns alone, so bits stay the same whatever the batch.
constexpr int64_t kNarrow = 2;

template <typename Acc>
Acc scalar_product(const Acc* x, const Acc* w, int64_t k) {
  constexpr int64_t kStep = kVector<Acc>;
  Vec<Acc> sum(Acc(0));
  int64_t i = 0;
  for (; i + kStep <= k; i += kStep) sum = at::vec::fmadd(Vec<Acc>::loadu(x + i), Vec<Acc>::loadu(w + i), sum);
  if (i < k) {
    const int rest = static_cast<int>(k - i);
    sum = at::vec::fmadd(Vec<Acc>::loadu(x + i, rest), Vec<Acc>::loadu(w + i, rest), sum);
  }
  return at::vec::vec_reduce_all<Acc>([](const auto& a, const auto& b) { return a + b; }, sum);
}

template <typename Acc>
void multiply_tile(const Acc* x, int64_t x_row_stride, int64_t rows, int64_t depth, Rows<const Acc> panel,
                   int64_t vectors, bool add, Rows<Acc> sums) {
  switch (rows) {
    case 6:
      return multiply_columns<Acc, 6>(x, x_row_stride, depth, panel, vectors, add, sums);
    case 5:
      return multiply_columns<Acc, 5>(x, x_row_stride, depth, panel, vectors, add, sums);
    case 4:
      return multiply_columns<Acc, 4>(x, x_row_stride, depth, panel, vectors, add, sums);
    case 3:
      return multiply_columns<Acc, 3>(x, x_row_stride, depth, panel, vectors, add, sums);
    case 2:
      return multiply_columns<Acc, 2>(x, x_row_stride, depth, panel, vectors, add, sums);
    default:
      return multiply_columns<Acc, 1>(x, x_row_stride, depth, panel, vectors, add, sums);
  }
}

template <Activation kActivation, typename Acc>
Vec<Acc> activate(const Vec<Acc>& z) {
  const Vec<Acc> one(Acc(1));
  if constexpr (kActivation == Activation::kRelu) return at::vec::maximum(z, Vec<Acc>(Acc(0)));  // keeps NaN
  if constexpr (kActivation == Activation::kSigmoid) return one / (one + z.neg().exp());
  if constexpr (kActivation == Activation::kTanh) return z.tanh();
  if constexpr (kActivation == Activation::kSilu) return z / (one + z.neg().exp());
  if constexpr (kActivation == Activation::kGelu) {
    return z * Vec<Acc>(Acc(0.5)) * (one + (z * Vec<Acc>(Acc(0.70710678118654752440))).erf());
  }
  return z;
}

template <typename Acc>
void store_row(const Acc* row, int64_t columns, Acc* out) {
  int64_t c = 0;
  for (; c + kVector<Acc> <= columns; c += kVector<Acc>) Vec<Acc>::loadu(row + c).store(out + c);
  if (c < columns) Vec<Acc>::loadu(row + c).store(out + c, static_cast<int>(columns - c));
}

template <typename Out, typename = std::enable_if_t<!std::is_same_v<Out, float>>>
void store_row(const float* row, int64_t columns, Out* out) {
  constexpr int64_t kStep = 2 * kVector<float>;
  static_assert(Vec<Out>::size() == kStep, "two float vectors make one 16-bit vector");
  for (int64_t c = 0; c < columns; c += kStep) {
    const auto pair =
        at::vec::convert_from_float<Out>(Vec<float>::loadu(row + c), Vec<float>::loadu(row + c + kVector<float>));
    pair.store(out + c, static_cast<int>(std::min(columns - c, kStep)));
  }
}

// Adds what the rows look up and the bias, applies the activation and writes the rows: from the cache, in the one pass
// over the output. `sums` may be the output itself.
template <Activation kActivation, typename T, typename Out>
void finish_chunk(const RowLinear<T, Out>& job, int64_t row, int64_t rows, int64_t column, int64_t columns,
                  Rows<AccOf<T>> sums) {
  using Acc = AccOf<T>;
  for (int64_t r = 0; r < rows; ++r) {
    Acc* values = sums.row(r);
    for (int64_t c = 0; c < columns; c += kVector<Acc>) {
      Vec<Acc> z = Vec<Acc>::loadu(values + c);
      for (int64_t t = 0; t < job.num_terms; ++t) {
        const auto& term = job.terms[t];
        z = z + Vec<Acc>::loadu(term.rows + term.index[row + r] * term.row_stride + column + c);
      }
      if (job.bias != nullptr) z = z + Vec<Acc>::loadu(job.bias + column + c);
      activate<kActivation, Acc>(z).store(values + c);
    }
    Out* out = job.out + (row + r) * job.out_row_stride + column;
    if (static_cast<const void*>(out) != values) store_row(values, columns, out);
  }
}

template <typename T, typename Out>
void finish(const RowLinear<T, Out>& job, int64_t row, int64_t rows, int64_t column, int64_t columns,
            Rows<AccOf<T>> sums) {
  switch (job.activation) {
    case Activation::kNone:
      return finish_chunk<Activation::kNone>(job, row, rows, column, columns, sums);
    case Activation::kRelu:
      return finish_chunk<Activation::kRelu>(job, row, rows, column, columns, sums);
    case Activation::kSigmoid:
      return finish_chunk<Activation::kSigmoid>(job, row, rows, column, columns, sums);
    case Activation::kTanh:
      return finish_chunk<Activation::kTanh>(job, row, rows, column, columns, sums);
    case Activation::kSilu:
      return finish_chunk<Activation::kSilu>(job, row, rows, column, columns, sums);
    case Activation::kGelu:
      return finish_chunk<Activation::kGelu>(job, row, rows, column, columns, sums);
  }
}

// Reads `count` elements `stride` apart as Acc.
template <typename T>
void load_row(const T* from, int64_t stride, int64_t count, AccOf<T>* to) {
  int64_t i = 0;
  if (stride == 1) {
    if constexpr (std::is_same_v<T, AccOf<T>>) {
      std::copy(from, from + count, to);
      return;
    } else {
      for (; i + kVector<float> <= count; i += kVector<float>) {
        Vec<float> values;
        at::vec::load_to_float<T>(from + i, values);
        values.store(to + i);
      }
    }
  }
  for (; i < count; ++i) to[i] = static_cast<AccOf<T>>(from[i * stride]);
}

template <typename T, typename Out>
bool needs_scratch(const RowLinear<T, Out>& job) {
  return !std::is_same_v<T, AccOf<T>> || job.x_col_stride != 1;
}

// Wᵀ lies in memory as the panels of it would: whole vectors of it are read, and nothing beyond. Rows that lie apart
// are packed, for they would push each other out of the first-level cache.
template <typename T, typename Out>
bool reads_in_place(const RowLinear<T, Out>& job) {
  const bool whole = job.n > kNarrow && job.n % kVector<AccOf<T>> == 0;
  return std::is_same_v<T, AccOf<T>> && job.w_row_stride == 1 && job.w_col_stride == job.n && whole;
}

template <typename T, typename Out>
void compute(const RowLinear<T, Out>& job, int64_t row, int64_t rows, int64_t column, int64_t columns,
             const AccOf<T>* packed, AccOf<T>* scratch) {
  using Acc = AccOf<T>;
  const Acc* x = nullptr;
  int64_t x_row_stride = 0;
  if (needs_scratch(job)) {
    for (int64_t r = 0; r < rows; ++r) {
      load_row(job.x + (row + r) * job.x_row_stride, job.x_col_stride, job.k, scratch + r * job.k);
    }
    x = scratch;
    x_row_stride = job.k;
  } else if constexpr (std::is_same_v<T, Acc>) {
    x = job.x + row * job.x_row_stride;
    x_row_stride = job.x_row_stride;
  }
  const int64_t vectors = (columns + kVector<Acc> - 1) / kVector<Acc>;
  alignas(64) Acc buffer[kChunkRows * kPanel<Acc>];
  Rows<Acc> sums{buffer, kPanel<Acc>};
  if constexpr (std::is_same_v<Out, Acc>) {
    // Whole vectors are summed in the output itself, unless they are read again and lie far apart.
    const bool near = job.k <= kFold || job.out_row_stride <= kPanel<Acc>;
    if (columns % kVector<Acc> == 0 && near) sums = {job.out + row * job.out_row_stride + column, job.out_row_stride};
  }
  const bool direct = sums.data != buffer;
  if (job.n <= kNarrow || job.k == 0 || (!std::is_same_v<Out, Acc> && vectors % 2 == 1)) {
    // Vectors are read whole, and in pairs where 16-bit results are written, so they must hold something.
    for (int64_t r = 0; r < rows; ++r) std::fill_n(sums.row(r), direct ? columns : kPanel<Acc>, Acc(0));
  }
  if (job.n <= kNarrow) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        sums.row(r)[c] = scalar_product(x + r * x_row_stride, packed + c * job.k, job.k);
      }
    }
    return finish(job, row, rows, column, columns, sums);
  }
  Rows<const Acc> panel{packed, vectors * kVector<Acc>};
  if constexpr (std::is_same_v<T, Acc>) {
    if (packed == nullptr) panel = {job.w + column, job.w_col_stride};
  }
  for (int64_t i = 0; i < job.k; i += kFold) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      multiply_tile<Acc>(x + r * x_row_stride + i, x_row_stride, std::min<int64_t>(kTileRows, rows - r),
                         std::min(kFold, job.k - i), {panel.row(i), panel.stride}, vectors, i > 0,
                         {sums.row(r), sums.stride});
    }
  }
  const bool bare = job.num_terms == 0 && job.bias == nullptr && job.activation == Activation::kNone;
  if (!direct || !bare) finish(job, row, rows, column, columns, sums);
}

template <typename T, typename Out>
void pack(const RowLinear<T, Out>& job, int64_t column, int64_t columns, AccOf<T>* panel) {
  using Acc = AccOf<T>;
  constexpr int64_t kBlock = 16;  // of both directions, so that the lines written stay in the cache until full
  const int64_t width = (columns + kVector<Acc> - 1) / kVector<Acc> * kVector<Acc>;
  if (job.n <= kNarrow) {
    for (int64_t c = 0; c < columns; ++c) {
      load_row(job.w + (column + c) * job.w_row_stride, job.w_col_stride, job.k, panel + c * job.k);
    }
    return;
  }
  if (job.w_row_stride == 1) {  // Wᵀ lies in memory as it is: rows are copied
    for (int64_t i = 0; i < job.k; ++i) {
      load_row(job.w + column + i * job.w_col_stride, 1, columns, panel + i * width);
      std::fill(panel + i * width + columns, panel + (i + 1) * width, Acc(0));
    }
    return;
  }
  Acc block[kBlock * kBlock];
  for (int64_t i = 0; i < job.k; i += kBlock) {
    const int64_t depth = std::min(kBlock, job.k - i);
    for (int64_t c = 0; c < width; c += kBlock) {
      const int64_t count = std::min(kBlock, width - c);
      const int64_t valid = std::clamp<int64_t>(columns - c, 0, count);
      if constexpr (std::is_same_v<T, Acc>) {
        if (depth == kBlock && valid == kBlock && job.w_col_stride == 1) {
          at::vec::transpose_mxn<Acc, kBlock, kBlock>(job.w + (column + c) * job.w_row_stride + i, job.w_row_stride,
                                                      panel + i * width + c, width);
          continue;
        }
      }
      for (int64_t n = 0; n < valid; ++n) {
        load_row(job.w + (column + c + n) * job.w_row_stride + i * job.w_col_stride, job.w_col_stride, depth,
                 block + n * kBlock);
      }
      std::fill(block + valid * kBlock, block + count * kBlock, Acc(0));
      if (depth == kBlock && count == kBlock) {
        at::vec::transpose_mxn<Acc, kBlock, kBlock>(block, kBlock, panel + i * width + c, width);
      } else {
        for (int64_t d = 0; d < depth; ++d) {
          for (int64_t n = 0; n < count; ++n) panel[(i + d) * width + c + n] = block[n * kBlock + d];
        }
      }
    }
  }
}

}  // namespace

template <typename T, typename Out>
const RowLinearKernels<T, Out>& row_linear_kernels() {
  using Acc = AccOf<T>;
  static constexpr RowLinearKernels<T, Out> kKernels{kVector<Acc>,    kPanel<Acc>,           pack<T, Out>,
                                                     compute<T, Out>, needs_scratch<T, Out>, reads_in_place<T, Out>};
  return kKernels;
}

template const RowLinearKernels<double, double>& row_linear_kernels();
template const RowLinearKernels<float, float>& row_linear_kernels();
template const RowLinearKernels<c10::BFloat16, c10::BFloat16>& row_linear_kernels();
template const RowLinearKernels<c10::BFloat16, float>& row_linear_kernels();
template const RowLinearKernels<c10::Half, c10::Half>& row_linear_kernels();
template const RowLinearKernels<c10::Half, float>& row_linear_kernels();

}  // namespace ikbo::cpu::CPU_CAPABILITY
