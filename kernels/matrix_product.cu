#include <mma.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/matrix_product.h"
#include "kernels/scalars.cuh"

namespace ikbo::kernels {
namespace {

constexpr int kTile = 64;  // rows and columns of the result that a block computes, unless it says otherwise
constexpr int kLargeTile = 128;

struct Params {
  int64_t batch, m, n, k;
  const void* a;
  int64_t a_row_stride, a_column_stride;
  const void* b;
  int64_t b_batch_stride, b_row_stride, b_column_stride;
  const void* bias;
  LookedUpSums terms[kMaxLookedUpSums];
  int term_count;
  bool index_by_row;
  bool out_is_sum_type;
  bool a_by_vectors, b_by_vectors;
  Activation activation;
  void* out;
  int64_t row_tiles, column_tiles;
};

template <typename Sum>
__device__ Sum activate(Activation activation, Sum x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? Sum{0} : x;  // NaN stays NaN
    case Activation::kSigmoid:
      return 1 / (1 + exp(-x));
    case Activation::kTanh:
      return tanh(x);
    case Activation::kSilu:
      return x / (1 + exp(-x));
    case Activation::kGelu:
      return x * (erf(x * Sum{0.70710678118654752}) * Sum{0.5} + Sum{0.5});
  }
  return x;
}

struct Tile {
  int64_t z, row, column;  // of the result's first element
};

// The tiles of one block of columns follow each other, so that what is shared stays in the caches.
__device__ Tile tile_of(const Params& p, int64_t number, int size) {
  const int64_t row_tile = number % p.row_tiles;
  const int64_t column_tile = number / p.row_tiles % p.column_tiles;
  return {number / p.row_tiles / p.column_tiles, row_tile * size, column_tile * size};
}

template <typename T>
__device__ void finish(const Params& p, const Tile& tile, int64_t row, int64_t column, SumOf<T> value) {
  using Sum = SumOf<T>;
  if (row >= p.m || column >= p.n) return;
  for (int t = 0; t < p.term_count; ++t) {
    const LookedUpSums& term = p.terms[t];
    const int64_t from = term.index[p.index_by_row ? row : tile.z];
    if (from < 0 || from >= term.rows) {
      value = quiet_nan<Sum>();
    } else {
      const int64_t sums_row = p.index_by_row ? from : from * p.m + row;
      value += static_cast<const Sum*>(term.sums)[sums_row * p.n + column];
    }
  }
  if (p.bias != nullptr) value += widen(static_cast<const T*>(p.bias)[column]);
  value = activate(p.activation, value);
  const int64_t at = (tile.z * p.m + row) * p.n + column;
  if (p.out_is_sum_type) {
    static_cast<Sum*>(p.out)[at] = value;
  } else {
    static_cast<T*>(p.out)[at] = narrow<T>(value);
  }
}

// ---- fp32 and fp64: fused multiply-adds, a square of results a thread.

constexpr int kPlainThreads = 256;
constexpr int kPlainDepth = 8;  // of k a step
constexpr int kSquare = 4;      // results that lie side by side; a thread has one or four such squares
constexpr int kFoldSteps =
    32;  // a chain of sums in fp32 is folded this often: its rounding error grows with its length
constexpr int kThreadsOfSide = 16;

template <typename T>
struct alignas(16) Four {
  T value[kSquare];
};

template <typename T, int kSquares>
struct PlainStep {
  static constexpr int kSize = kThreadsOfSide * kSquare * kSquares;  // of the tile's side
  alignas(16) T a[kPlainDepth][kSize + kSquare];
  alignas(16) T b[kPlainDepth][kSize + kSquare];
};

// Reads a (kSize, kPlainDepth) block into registers, consecutive threads along the dimension that is contiguous.
template <typename T, int kSize, int kHeld>
__device__ void read_block(const T* from, int64_t outer, int64_t outer_size, int64_t outer_stride, int64_t k,
                           int64_t k_size, int64_t k_stride, T (&held)[kHeld]) {
  const bool along_k = k_stride == 1;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kPlainThreads;
    const int64_t o = outer + (along_k ? at / kPlainDepth : at % kSize);
    const int64_t d = k + (along_k ? at % kPlainDepth : at / kSize);
    held[i] = o < outer_size && d < k_size ? from[o * outer_stride + d * k_stride] : T{0};
  }
}

template <typename T, int kSize, int kHeld, int kStride>
__device__ void write_block(T (&to)[kPlainDepth][kStride], bool along_k, const T (&held)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kPlainThreads;
    to[along_k ? at % kPlainDepth : at / kSize][along_k ? at / kPlainDepth : at % kSize] = held[i];
  }
}

// Tiles of 64 x 64 (one square a thread) or 128 x 128 (2 x 2 squares): the same chain of sums in both.
template <typename T, int kSquares>
__global__ __launch_bounds__(kPlainThreads) void plain_product_kernel(const __grid_constant__ Params p, int64_t tiles) {
  using Step = PlainStep<T, kSquares>;
  constexpr int kSize = Step::kSize;
  constexpr int kHeld = kSize * kPlainDepth / kPlainThreads;
  constexpr int kSide = kSquare * kSquares;
  constexpr bool kFolds = sizeof(T) == 4;
  __shared__ Step step;
  const int own_row = static_cast<int>(threadIdx.x) / kThreadsOfSide * kSquare;
  const int own_column = static_cast<int>(threadIdx.x) % kThreadsOfSide * kSquare;
  // Result i of a thread's side.
  const auto offset = [](int i) { return i / kSquare * kThreadsOfSide * kSquare + i % kSquare; };
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of(p, number, kSize);
    const T* const a = static_cast<const T*>(p.a);
    const T* const b = static_cast<const T*>(p.b) + tile.z * p.b_batch_stride;
    T sum[kSide][kSide] = {};
    T folded[kFolds ? kSide : 1][kFolds ? kSide : 1] = {};
    T held_a[kHeld], held_b[kHeld];
    const auto read = [&](int64_t k) {
      read_block<T, kSize>(a, tile.row, p.m, p.a_row_stride, k, p.k, p.a_column_stride, held_a);
      read_block<T, kSize>(b, tile.column, p.n, p.b_column_stride, k, p.k, p.b_row_stride, held_b);
    };
    const auto fold = [&] {
      if constexpr (kFolds) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            folded[i][j] += sum[i][j];
            sum[i][j] = 0;
          }
        }
      }
    };
    read(0);
    int until_fold = kFoldSteps;
    for (int64_t k = 0; k < p.k; k += kPlainDepth) {
      write_block<T, kSize>(step.a, p.a_column_stride == 1, held_a);
      write_block<T, kSize>(step.b, p.b_row_stride == 1, held_b);
      __syncthreads();
      if (k + kPlainDepth < p.k) read(k + kPlainDepth);
#pragma unroll
      for (int d = 0; d < kPlainDepth; ++d) {
        Four<T> x[kSquares], y[kSquares];
#pragma unroll
        for (int i = 0; i < kSquares; ++i) {
          x[i] = *reinterpret_cast<const Four<T>*>(&step.a[d][own_row + offset(i * kSquare)]);
          y[i] = *reinterpret_cast<const Four<T>*>(&step.b[d][own_column + offset(i * kSquare)]);
        }
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            sum[i][j] = fma(x[i / kSquare].value[i % kSquare], y[j / kSquare].value[j % kSquare], sum[i][j]);
          }
        }
      }
      if (--until_fold == 0) {
        fold();
        until_fold = kFoldSteps;
      }
      __syncthreads();
    }
    fold();
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        finish<T>(p, tile, tile.row + own_row + offset(i), tile.column + own_column + offset(j),
                  kFolds ? folded[kFolds ? i : 0][kFolds ? j : 0] : sum[i][j]);
      }
    }
  }
}

// ---- fp16 and bf16: the matrix unit through warp-wide fragments of 16 x 16 x 16, 32 x 32 results a warp.

constexpr int kMatrixThreads = 128;
constexpr int kMatrixDepth = 32;
constexpr int kFragment = 16;
constexpr int kPad = 8;  // elements: keeps the rows 16-byte aligned and apart in the banks
constexpr int kVector = 8;
constexpr int kVectorsOfThread = kTile * kMatrixDepth / kVector / kMatrixThreads;

// A block of 64 x 32, k contiguous (rows of k), or 32 x 64, k outside.
template <typename T, bool kAlongK>
struct MatrixBlock {
  static constexpr int kRows = kAlongK ? kTile : kMatrixDepth;
  static constexpr int kColumns = kAlongK ? kMatrixDepth : kTile;
  static constexpr int kStride = kColumns + kPad;
  T at[kRows][kStride];
};

union Vector {
  uint4 bits;
  uint16_t element[kVector];
};

template <typename T, bool kAlongK>
__device__ void read_vectors(const T* from, int64_t outer, int64_t outer_size, int64_t outer_stride, int64_t k,
                             int64_t k_size, int64_t k_stride, bool by_vectors, Vector (&held)[kVectorsOfThread]) {
  using Block = MatrixBlock<T, kAlongK>;
  constexpr int kVectorsOfRow = Block::kColumns / kVector;
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kMatrixThreads;
    const int row = at / kVectorsOfRow;
    const int column = at % kVectorsOfRow * kVector;
    const int64_t o = outer + (kAlongK ? row : column);
    const int64_t d = k + (kAlongK ? column : row);
    const int64_t left = kAlongK ? k_size - d : outer_size - o;  // elements that exist in the vector's direction
    const bool exists = kAlongK ? o < outer_size : d < k_size;
    const int64_t stride = kAlongK ? k_stride : outer_stride;
    const auto* const source = reinterpret_cast<const uint16_t*>(from) + o * outer_stride + d * k_stride;
    held[i].bits = uint4{0, 0, 0, 0};
    if (exists && by_vectors && left >= kVector) {
      held[i].bits = *reinterpret_cast<const uint4*>(source);
    } else if (exists) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (e < left) held[i].element[e] = source[e * stride];
      }
    }
  }
}

template <typename T, bool kAlongK>
__device__ void write_vectors(MatrixBlock<T, kAlongK>& to, const Vector (&held)[kVectorsOfThread]) {
  constexpr int kVectorsOfRow = MatrixBlock<T, kAlongK>::kColumns / kVector;
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kMatrixThreads;
    *reinterpret_cast<uint4*>(&to.at[at / kVectorsOfRow][at % kVectorsOfRow * kVector]) = held[i].bits;
  }
}

template <typename T, bool kBAlongK>
struct alignas(16) MatrixStep {
  MatrixBlock<T, true> a;
  MatrixBlock<T, kBAlongK> b;
};

constexpr int kSumsStride = kTile + 4;

template <typename T, bool kBAlongK>
__global__ __launch_bounds__(kMatrixThreads) void matrix_product_kernel(const __grid_constant__ Params p,
                                                                        int64_t tiles) {
  namespace wmma = nvcuda::wmma;
  using Layout = std::conditional_t<kBAlongK, wmma::col_major, wmma::row_major>;
  constexpr int kFragments = 2;  // a side of a warp's square
  // The finished sums take the place of the last steps.
  __shared__ union {
    MatrixStep<T, kBAlongK> step[2];
    alignas(16) float sums[kTile][kSumsStride];
  } shared;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * (kFragments * kFragment);
  const int warp_column = warp % 2 * (kFragments * kFragment);
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of(p, number, kTile);
    const T* const a = static_cast<const T*>(p.a);
    const T* const b = static_cast<const T*>(p.b) + tile.z * p.b_batch_stride;
    wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float> sum[kFragments][kFragments];
    for (auto& row : sum) {
      for (auto& fragment : row) wmma::fill_fragment(fragment, 0.0f);
    }
    Vector held_a[kVectorsOfThread], held_b[kVectorsOfThread];
    const auto read = [&](int64_t k) {
      read_vectors<T, true>(a, tile.row, p.m, p.a_row_stride, k, p.k, p.a_column_stride, p.a_by_vectors, held_a);
      read_vectors<T, kBAlongK>(b, tile.column, p.n, p.b_column_stride, k, p.k, p.b_row_stride, p.b_by_vectors, held_b);
    };
    read(0);
    int stage = 0;
    for (int64_t k = 0; k < p.k; k += kMatrixDepth, stage ^= 1) {
      auto& step = shared.step[stage];
      write_vectors(step.a, held_a);
      write_vectors(step.b, held_b);
      // One barrier a step: who writes a stage again has passed the barrier after everyone's reading of it.
      __syncthreads();
      if (k + kMatrixDepth < p.k) read(k + kMatrixDepth);
#pragma unroll
      for (int d = 0; d < kMatrixDepth; d += kFragment) {
        wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, T, wmma::row_major> x[kFragments];
        wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, T, Layout> y[kFragments];
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          wmma::load_matrix_sync(x[i], &step.a.at[warp_row + i * kFragment][d], MatrixBlock<T, true>::kStride);
          const T* const from =
              kBAlongK ? &step.b.at[warp_column + i * kFragment][d] : &step.b.at[d][warp_column + i * kFragment];
          wmma::load_matrix_sync(y[i], from, MatrixBlock<T, kBAlongK>::kStride);
        }
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
#pragma unroll
          for (int j = 0; j < kFragments; ++j) wmma::mma_sync(sum[i][j], x[i], y[j], sum[i][j]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        wmma::store_matrix_sync(&shared.sums[warp_row + i * kFragment][warp_column + j * kFragment], sum[i][j],
                                kSumsStride, wmma::mem_row_major);
      }
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kTile; at += kMatrixThreads) {
      const int row = at / kTile;
      const int column = at % kTile;
      finish<T>(p, tile, tile.row + row, tile.column + column, shared.sums[row][column]);
    }
    __syncthreads();
  }
}

// Whether 8 elements in a row can be read at once wherever a step begins: steps are multiples of 32 and 64.
bool by_vectors(const void* pointer, int64_t along_stride, int64_t across_stride, int64_t batch_stride) {
  return along_stride == 1 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && across_stride % kVector == 0 &&
         batch_stride % kVector == 0;
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    throw std::runtime_error("matrix_product: the current device cannot be asked for its multiprocessors");
  }
  return count;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument("matrix_product: " + what);
}

}  // namespace

void matrix_product(const MatrixProduct& product, cudaStream_t stream) {
  require(product.batch >= 0 && product.m >= 0 && product.n >= 0 && product.k >= 0, "a size is negative");
  const ScalarType sum_type = product.type == ScalarType::kFloat64 ? ScalarType::kFloat64 : ScalarType::kFloat32;
  require(product.out_type == product.type || product.out_type == sum_type,
          "out_type must be type or the type that sums are kept in");
  require(
      product.terms.size() <= kMaxLookedUpSums,
      "at most " + std::to_string(kMaxLookedUpSums) + " broadcast terms, not " + std::to_string(product.terms.size()));
  if (product.batch == 0 || product.m == 0 || product.n == 0) return;
  Params p{};
  p.batch = product.batch;
  p.m = product.m;
  p.n = product.n;
  p.k = product.k;
  p.a = product.a;
  p.a_row_stride = product.a_row_stride;
  p.a_column_stride = product.a_column_stride;
  p.b = product.b;
  p.b_batch_stride = product.b_batch_stride;
  p.b_row_stride = product.b_row_stride;
  p.b_column_stride = product.b_column_stride;
  p.bias = product.bias;
  std::copy(product.terms.begin(), product.terms.end(), p.terms);
  p.term_count = static_cast<int>(product.terms.size());
  p.index_by_row = product.index_by_row;
  p.out_is_sum_type = product.out_type == sum_type && product.out_type != product.type;
  p.activation = product.activation;
  p.out = product.out;
  const auto cut = [&](int size) {
    p.row_tiles = (p.m + size - 1) / size;
    p.column_tiles = (p.n + size - 1) / size;
    return p.batch * p.row_tiles * p.column_tiles;
  };
  const auto grid = [](int64_t tiles) { return static_cast<unsigned>(std::min<int64_t>(tiles, INT32_MAX)); };
  // The second operand lies in shared memory the way it lies in memory.
  const bool b_along_k = product.b_row_stride == 1 && product.b_column_stride != 1;
  p.a_by_vectors = by_vectors(p.a, p.a_column_stride, p.a_row_stride, 0);
  p.b_by_vectors = b_along_k ? by_vectors(p.b, p.b_row_stride, p.b_column_stride, p.b_batch_stride)
                             : by_vectors(p.b, p.b_column_stride, p.b_row_stride, p.b_batch_stride);
  with_scalar(product.type, [&](auto scalar) {
    using T = decltype(scalar);
    if constexpr (sizeof(T) == 2) {
      const int64_t tiles = cut(kTile);
      const auto kernel = b_along_k ? matrix_product_kernel<T, true> : matrix_product_kernel<T, false>;
      kernel<<<grid(tiles), kMatrixThreads, 0, stream>>>(p, tiles);
    } else {
      // Large tiles read shared memory half as often, where there are enough of them for the whole chip.
      int64_t tiles = cut(kLargeTile);
      if (tiles >= multiprocessors()) {
        plain_product_kernel<T, 2><<<grid(tiles), kPlainThreads, 0, stream>>>(p, tiles);
      } else {
        tiles = cut(kTile);
        plain_product_kernel<T, 1><<<grid(tiles), kPlainThreads, 0, stream>>>(p, tiles);
      }
    }
  });
  check_launch("matrix_product");
}

}  // namespace ikbo::kernels
