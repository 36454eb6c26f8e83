#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/finish_sums.h"
#include "kernels/hopper/launch.h"
#include "kernels/hopper/sync.h"
#include "kernels/scalars.cuh"

namespace ikbo::kernels {
namespace {

struct Params {
  int64_t candidates, columns, row_stride;
  const void* sums;
  LookedUpSums terms[kMaxLookedUpSums];
  int term_count;
  const void* bias;
  Activation activation;
  void* out;
};

// All of them by one branch.
template <typename Sum, int COUNT>
__device__ __forceinline__ void activate(Activation activation, Sum (&values)[COUNT]) {
  const auto each = [&values](auto function) {
#pragma unroll
    for (Sum& x : values) x = function(x);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return each([](Sum x) { return x < 0 ? Sum{0} : x; });  // NaN stays NaN
    case Activation::kSigmoid:
      return each([](Sum x) { return 1 / (1 + exp(-x)); });
    case Activation::kTanh:
      return each([](Sum x) { return tanh(x); });
    case Activation::kSilu:
      return each([](Sum x) { return x / (1 + exp(-x)); });
    case Activation::kGelu:
      return each([](Sum x) { return x * (erf(x * Sum{0.70710678118654752}) * Sum{0.5} + Sum{0.5}); });
  }
}

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Vector {
  T value[WIDTH];
};

constexpr int kThreads = 256;
constexpr int kWidth = 4;  // columns of a thread

// The columns of a thread. VECTORS: they are neighbours and all exist; otherwise those of a warp's threads are
// neighbours.
template <bool VECTORS>
struct Columns {
  int64_t first;
  int step;  // from one to the next
  int left;  // columns from `first` on, or more than the thread has

  __device__ __forceinline__ Columns(int64_t block, int64_t all)
      : first(block * kWidth * blockDim.x + threadIdx.x * (VECTORS ? kWidth : 1)),
        step(VECTORS ? 1 : static_cast<int>(blockDim.x)),
        left(static_cast<int>(min(all - first, int64_t{kWidth} * kThreads))) {}

  __device__ __forceinline__ bool exists(int i) const { return VECTORS || i * step < left; }
};

template <bool VECTORS, typename T>
__device__ __forceinline__ Vector<T, kWidth> load(const void* row, const Columns<VECTORS>& columns) {
  const T* const from = static_cast<const T*>(row) + columns.first;
  if constexpr (VECTORS) return *reinterpret_cast<const Vector<T, kWidth>*>(from);
  Vector<T, kWidth> value{};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (columns.exists(i)) value.value[i] = from[i * columns.step];
  }
  return value;
}

// threadIdx.y picks one of a block's candidates, threadIdx.x and blockIdx.y run along its row.
template <typename T, typename Out, bool VECTORS>
__global__ void __launch_bounds__(kThreads) finish_sums_kernel(const __grid_constant__ Params p) {
  using Sum = SumOf<T>;
  hopper::grid_dependency_launch();
  const auto sums_of = [&](const void* sums, int64_t row, const Columns<VECTORS>& columns) {
    return load<VECTORS, Sum>(static_cast<const Sum*>(sums) + row * p.row_stride, columns);
  };
  hopper::grid_dependency_wait();
  for (int64_t b = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; b < p.candidates;
       b += int64_t{gridDim.x} * blockDim.y) {
    for (int64_t block = blockIdx.y; block * kWidth * blockDim.x < p.columns; block += gridDim.y) {
      const Columns<VECTORS> columns(block, p.columns);
      if (columns.left <= 0) break;
      // Whatever needs no index is under way before the index is there.
      int64_t row = p.term_count > 0 ? p.terms[0].index[b] : 0;
      Vector<Sum, kWidth> value = sums_of(p.sums, b, columns);
      T bias[kWidth];
      if (p.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (columns.exists(i)) bias[i] = static_cast<const T*>(p.bias)[columns.first + i * columns.step];
        }
      }
#pragma unroll 1
      for (int t = 0; t < p.term_count; ++t) {
        if (t > 0) row = p.terms[t].index[b];
        const bool exists = row >= 0 && row < p.terms[t].rows;
        Vector<Sum, kWidth> add;
        if (exists) add = sums_of(p.terms[t].sums, row, columns);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) value.value[i] += exists ? add.value[i] : quiet_nan<Sum>();
      }
      if (p.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) value.value[i] += widen(bias[i]);
      }
      activate(p.activation, value.value);
      if constexpr (VECTORS) {
        Vector<Out, kWidth> result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result.value[i] = narrow<Out>(value.value[i]);
        static_cast<Vector<Out, kWidth>*>(p.out)[(b * p.columns + columns.first) / kWidth] = result;
      } else {
        Out* const to = static_cast<Out*>(p.out) + b * p.columns + columns.first;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (columns.exists(i)) to[i * columns.step] = narrow<Out>(value.value[i]);
        }
      }
    }
  }
}

template <typename T, typename Out, bool VECTORS>
void launch(const Params& p, cudaStream_t stream) {
  constexpr int64_t kMostAlong = 65'535;
  const int64_t vectors = (p.columns + kWidth - 1) / kWidth;
  int along = 1;
  while (along < kThreads && along < vectors) along *= 2;
  const dim3 threads(along, kThreads / along);
  const int64_t blocks_along = std::min((vectors + along - 1) / along, kMostAlong);
  const int64_t blocks = std::min<int64_t>((p.candidates + threads.y - 1) / threads.y, INT32_MAX);
  hopper::launch_early(finish_sums_kernel<T, Out, VECTORS>,
                       dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_along)), threads, 0, stream, p);
  check_launch("finish_sums");
}

template <typename T, typename Out>
void launch_widest(const Params& p, cudaStream_t stream) {
  auto address = reinterpret_cast<uintptr_t>(p.sums);
  for (int t = 0; t < p.term_count; ++t) address |= reinterpret_cast<uintptr_t>(p.terms[t].sums);
  const bool vectors = p.row_stride % kWidth == 0 && address % (kWidth * sizeof(SumOf<T>)) == 0 &&
                       p.columns % kWidth == 0 && reinterpret_cast<uintptr_t>(p.out) % (kWidth * sizeof(Out)) == 0;
  if (vectors) {
    launch<T, Out, true>(p, stream);
  } else {
    launch<T, Out, false>(p, stream);
  }
}

}  // namespace

void finish_sums(const FinishSums& job, cudaStream_t stream) {
  if (job.terms.size() > kMaxLookedUpSums) {
    throw std::invalid_argument("at most " + std::to_string(kMaxLookedUpSums) + " broadcast terms, not " +
                                std::to_string(job.terms.size()));
  }
  if (job.candidates == 0 || job.columns == 0) return;
  Params p{job.candidates, job.columns,    job.row_stride, job.sums, {}, static_cast<int>(job.terms.size()),
           job.bias,       job.activation, job.out};
  std::copy(job.terms.begin(), job.terms.end(), p.terms);
  with_scalar(job.type, [&](auto scalar) {
    using T = decltype(scalar);
    if (job.out_type == job.type) {
      launch_widest<T, T>(p, stream);
    } else {
      launch_widest<T, SumOf<T>>(p, stream);
    }
  });
}

}  // namespace ikbo::kernels
