// The CPU arithmetic of ikbo::linear: a matrix product whose rows do not know of each other.
//
// A library GEMM chooses its kernel, and with it the order of additions, by the number of rows, so a candidate scored
// alone and the same candidate in a batch differ in their last bits. Padding every batch to a fixed block would cure
// that at the price of computing a whole block for a single candidate, and still trusts the library to treat every row
// of a block alike. Here each output element is one chain of fused multiply-adds over K, in order, whatever tile the
// row falls into: equal bits by construction, no padding, and the gathered rows, the bias and the activation are added
// while the tile is still in the first-level cache.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ikbo::cpu {

enum class Activation { kNone, kRelu, kSigmoid, kTanh, kSilu, kGelu };

/// Multiply-adds worth a thread's start.
inline constexpr int64_t kGrainWork = 1 << 18;

/// The type in which sums over elements of type T are kept: double for double, float for the rest.
template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// A matrix with one row for each candidate of `index`, never written out: row b is `rows[index[b]]`.
template <typename Acc>
struct GatheredRows {
  const Acc* rows;       // (num_rows, row_stride), row_stride at least the packed width of the result
  int64_t row_stride;    // elements
  const int32_t* index;  // (batch)
};

/// out[b] = act(W x[b] + Σ_t terms[t].rows[terms[t].index[b]] + bias) with sums in Acc and one rounding to Out.
/// Strides are in elements. `out` overlaps no operand.
template <typename T, typename Out>
struct RowLinear {
  using Acc = AccOf<T>;
  const T* x;  // (batch, k)
  int64_t x_row_stride;
  int64_t x_col_stride;
  int64_t batch;
  int64_t k;
  const T* w;  // (n, k)
  int64_t w_row_stride;
  int64_t w_col_stride;
  int64_t n;
  const GatheredRows<Acc>* terms = nullptr;
  int64_t num_terms = 0;
  const Acc* bias = nullptr;  // (packed_width(n)), or null for none
  Activation activation = Activation::kNone;
  Out* out;  // (batch, n)
  int64_t out_row_stride;
};

/// Columns a result of n columns takes once padded to whole vectors: the row stride of gathered rows and the length of
/// `bias` must be at least this, because whole vectors of them are read.
template <typename Acc>
int64_t packed_width(int64_t n);

/// Computes `job` on the threads of PyTorch's pool. Bits of a row depend on that row alone.
template <typename T, typename Out>
void run(const RowLinear<T, Out>& job);

}  // namespace ikbo::cpu
