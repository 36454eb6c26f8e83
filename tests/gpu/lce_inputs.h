// One generator of linear-compression inputs for tests and benchmark: fresh random data, NaN wherever nothing may read,
// poisoned outputs, and the comparison with float64.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/linear_compression.h"

namespace ikbo::testing {

void check(cudaError_t error, const char* what);

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  template <typename T = void>
  T* as() const {
    return static_cast<T*>(pointer_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* pointer_ = nullptr;
  size_t bytes_ = 0;
};

struct LceTermSize {
  int64_t rows = 0;
  int64_t k = 0;
};

struct LceSize {
  int64_t batch = 0;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k_candidate = 0;
  std::vector<LceTermSize> broadcast;
  kernels::ScalarType type = kernels::ScalarType::kBFloat16;
  kernels::ScalarType out_type = kernels::ScalarType::kBFloat16;
  bool align_w = true;   // the row stride of W a multiple of 8, as the transform writes it
  bool align_e = false;  // the row stride of E too, as ikbo::aligned_cat makes it
  int64_t e_gap = 0;     // elements between rows of E, besides
  int64_t shift = 0;     // elements by which W, E and out begin behind a multiple of 16 bytes
};

enum class Mapping { kRandom, kSorted };

// Normal data; the columns that pad W's rows, and a margin around every tensor, are NaN.
class LceInputs {
 public:
  LceInputs(const LceSize& size, uint64_t seed, Mapping mapping = Mapping::kRandom);

  const kernels::LinearCompressionProblem& problem() const { return problem_; }
  size_t out_bytes() const;
  size_t input_bytes() const;
  std::vector<int32_t>& index(size_t term) { return indices_[term]; }
  void upload_index(size_t term, cudaStream_t stream = nullptr);
  void poison_out(cudaStream_t stream = nullptr);
  // Overwrites a row of the candidate term (term < 0) or of a broadcast term with NaN.
  void fill_row_with_nan(int term, int64_t row);
  // Throws std::runtime_error where anything has been written before or behind the output.
  std::vector<uint8_t> download_out() const;

 private:
  void add_term(const LceSize& size, const LceTermSize& term, uint64_t seed, kernels::LinearCompressionTerm& to);

  kernels::LinearCompressionProblem problem_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::unique_ptr<DeviceBuffer> out_;  // with a margin on both sides
  int64_t out_begin_ = 0;              // bytes
  std::vector<std::vector<int32_t>> indices_;
  std::vector<int32_t*> device_indices_;
};

// count elements of a 16-bit type, normal with the given deviation.
void fill_normal(void* to, kernels::ScalarType type, int64_t count, double deviation, uint64_t seed,
                 cudaStream_t stream = nullptr);

struct Comparison {
  int64_t elements = 0;
  int64_t wrong_nans = 0;  // NaN in one of the two alone
  int64_t nans = 0;        // NaN in both
  int64_t outside = 0;     // further off than one rounding and the error of fp32 sums allow
  double root_mean_square = 0;
  double largest = 0;
};

// Compares problem.out with float64. `reference` holds B M N doubles.
Comparison compare(const kernels::LinearCompressionProblem& problem, const double* reference);

}  // namespace ikbo::testing
