#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/finish_sums.h"
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

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Vector {
  T value[WIDTH];
};

// WIDTH columns a thread: threadIdx.y picks one of a block's candidates, threadIdx.x and blockIdx.y run along its row.
// WHOLE: out's rows are whole vectors, too.
template <typename T, typename Out, int WIDTH, bool WHOLE>
__global__ void finish_sums_kernel(const __grid_constant__ Params p) {
  using Sum = SumOf<T>;
  const int64_t vectors = (p.columns + WIDTH - 1) / WIDTH;
  const int64_t stride = p.row_stride / WIDTH;
  for (int64_t b = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; b < p.candidates;
       b += int64_t{gridDim.x} * blockDim.y) {
    for (int64_t at = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; at < vectors;
         at += int64_t{gridDim.y} * blockDim.x) {
      Vector<Sum, WIDTH> value = static_cast<const Vector<Sum, WIDTH>*>(p.sums)[b * stride + at];
      for (int t = 0; t < p.term_count; ++t) {
        const int64_t row = p.terms[t].index[b];
        const bool exists = row >= 0 && row < p.terms[t].rows;
        Vector<Sum, WIDTH> add;
        if (exists) add = static_cast<const Vector<Sum, WIDTH>*>(p.terms[t].sums)[row * stride + at];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) value.value[i] += exists ? add.value[i] : quiet_nan<Sum>();
      }
      Vector<Out, WIDTH> result;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const bool exists = WHOLE || at * WIDTH + i < p.columns;
        Sum x = value.value[i];
        if (p.bias != nullptr && exists) x += widen(static_cast<const T*>(p.bias)[at * WIDTH + i]);
        result.value[i] = narrow<Out>(activate(p.activation, x));
        if (!WHOLE && exists) static_cast<Out*>(p.out)[b * p.columns + at * WIDTH + i] = result.value[i];
      }
      if (WHOLE) static_cast<Vector<Out, WIDTH>*>(p.out)[b * vectors + at] = result;
    }
  }
}

template <typename T, typename Out, int WIDTH, bool WHOLE>
void launch(const Params& p, cudaStream_t stream) {
  constexpr int kThreads = 256;
  constexpr int64_t kMostAlong = 65'535;
  const int64_t vectors = (p.columns + WIDTH - 1) / WIDTH;
  int along = 1;
  while (along < kThreads && along < vectors) along *= 2;
  const dim3 threads(along, kThreads / along);
  const int64_t blocks_along = std::min((vectors + along - 1) / along, kMostAlong);
  const int64_t blocks = std::min<int64_t>((p.candidates + threads.y - 1) / threads.y, INT32_MAX);
  finish_sums_kernel<T, Out, WIDTH, WHOLE>
      <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_along)), threads, 0, stream>>>(p);
  check_launch("finish_sums");
}

template <typename T, typename Out>
void launch_widest(const Params& p, cudaStream_t stream) {
  constexpr int kWidth = 4;
  auto address = reinterpret_cast<uintptr_t>(p.sums);
  for (int t = 0; t < p.term_count; ++t) address |= reinterpret_cast<uintptr_t>(p.terms[t].sums);
  if (p.row_stride % kWidth != 0 || address % (kWidth * sizeof(SumOf<T>)) != 0) {
    launch<T, Out, 1, true>(p, stream);
  } else if (p.columns % kWidth == 0 && reinterpret_cast<uintptr_t>(p.out) % (kWidth * sizeof(Out)) == 0) {
    launch<T, Out, kWidth, true>(p, stream);
  } else {
    launch<T, Out, kWidth, false>(p, stream);
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
