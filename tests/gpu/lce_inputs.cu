#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>

#include "tests/gpu/lce_inputs.h"

namespace ikbo::testing {
namespace {

using kernels::LinearCompressionProblem;
using kernels::LinearCompressionTerm;
using kernels::ScalarType;

constexpr int64_t kMarginElements = 1024;  // of NaN, on both sides

__device__ uint64_t mix(uint64_t x) {  // SplitMix64's finaliser
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

template <typename T>
__global__ void fill_normal_kernel(T* to, int64_t rows, int64_t columns, int64_t row_stride, float deviation,
                                   uint64_t seed) {
  const int64_t count = rows * columns;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = mix(seed * 0x2545f4914f6cdd1d + static_cast<uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    to[i / columns * row_stride + i % columns] = static_cast<T>(deviation * sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

template <typename Out>
__global__ void compare_kernel(const Out* out, const double* reference, int64_t count, double half_ulp, double floor,
                               unsigned long long* counts, double* sums) {
  double squares = 0;
  double largest = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const double expected = reference[i];
    const double got = static_cast<double>(static_cast<float>(out[i]));
    if (isnan(expected) || isnan(got)) {
      atomicAdd(&counts[isnan(expected) && isnan(got) ? 1 : 0], 1ull);
      continue;
    }
    const double error = fabs(got - expected);
    squares += error * error;
    largest = fmax(largest, error);
    if (!(error <= fabs(expected) * half_ulp + floor)) {
      atomicAdd(&counts[2], 1ull);
    }
  }
  atomicAdd(&sums[0], squares);
  // Positive doubles compare like their bits.
  atomicMax(reinterpret_cast<unsigned long long*>(&sums[1]),
            static_cast<unsigned long long>(__double_as_longlong(largest)));
}

void fill_matrix(void* to, ScalarType type, int64_t rows, int64_t columns, int64_t row_stride, double deviation,
                 uint64_t seed, cudaStream_t stream) {
  if (rows * columns == 0) {
    return;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((rows * columns + 255) / 256, 4096));
  if (type == ScalarType::kFloat16) {
    fill_normal_kernel<<<blocks, 256, 0, stream>>>(static_cast<__half*>(to), rows, columns, row_stride,
                                                   static_cast<float>(deviation), seed);
  } else {
    fill_normal_kernel<<<blocks, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(to), rows, columns, row_stride,
                                                   static_cast<float>(deviation), seed);
  }
  check(cudaGetLastError(), "fill");
}

int64_t bytes_of(ScalarType type) {
  return type == ScalarType::kFloat32 ? 4 : 2;
}

}  // namespace

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  check(cudaMalloc(&pointer_, std::max<size_t>(bytes, 256)), "cudaMalloc");
}
DeviceBuffer::~DeviceBuffer() {
  cudaFree(pointer_);
}

void fill_normal(void* to, ScalarType type, int64_t count, double deviation, uint64_t seed, cudaStream_t stream) {
  fill_matrix(to, type, 1, count, count, deviation, seed, stream);
}

void LceInputs::add_term(const LceSize& size, const LceTermSize& term, uint64_t seed, LinearCompressionTerm& to) {
  const int64_t w_stride = size.align_w ? (term.k + 7) / 8 * 8 : term.k;
  const int64_t e_stride = (size.align_e ? (size.n + 7) / 8 * 8 : size.n) + size.e_gap;
  const int64_t w_count = size.m * w_stride;
  const int64_t e_count = term.rows * term.k * e_stride;
  for (const int64_t count : {w_count, e_count}) {
    buffers_.push_back(std::make_unique<DeviceBuffer>((count + 2 * kMarginElements) * 2));
    check(cudaMemset(buffers_.back()->as(), 0xff, buffers_.back()->bytes()), "cudaMemset");  // NaN in both types
  }
  auto* w = buffers_[buffers_.size() - 2]->as<uint16_t>() + kMarginElements + size.shift;
  auto* e = buffers_[buffers_.size() - 1]->as<uint16_t>() + kMarginElements + size.shift;
  const double deviation = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(term.k, 1)));
  fill_matrix(w, size.type, size.m, term.k, w_stride, deviation, seed * 2 + 1, nullptr);
  fill_matrix(e, size.type, term.rows * term.k, size.n, e_stride, 1, seed * 2 + 2, nullptr);
  to.w = w;
  to.w_row_stride = w_stride;
  to.e = e;
  to.e_row_stride = e_stride;
  to.e_batch_stride = term.k * e_stride;
  to.rows = term.rows;
  to.k = term.k;
}

LceInputs::LceInputs(const LceSize& size, uint64_t seed, Mapping mapping) {
  problem_.batch = size.batch;
  problem_.m = size.m;
  problem_.n = size.n;
  problem_.type = size.type;
  problem_.out_type = size.out_type;
  add_term(size, {size.batch, size.k_candidate}, seed * 16, problem_.candidate);
  std::mt19937_64 random(seed);
  for (size_t t = 0; t < size.broadcast.size(); ++t) {
    LinearCompressionTerm term;
    add_term(size, size.broadcast[t], seed * 16 + t + 1, term);
    std::vector<int32_t> index(size.batch);
    for (int32_t& row : index) {
      row = size.broadcast[t].rows == 0 ? -1 : static_cast<int32_t>(random() % size.broadcast[t].rows);
    }
    if (mapping == Mapping::kSorted) {
      // As even as a batch of requests: candidate b belongs to row b * rows / batch.
      for (int64_t b = 0; b < size.batch; ++b) {
        index[b] = static_cast<int32_t>(b * size.broadcast[t].rows / size.batch);
      }
    }
    buffers_.push_back(std::make_unique<DeviceBuffer>(size.batch * sizeof(int32_t)));
    device_indices_.push_back(buffers_.back()->as<int32_t>());
    term.index = device_indices_.back();
    problem_.broadcast.push_back(term);
    indices_.push_back(std::move(index));
    upload_index(t);
  }
  out_begin_ = (kMarginElements + size.shift) * bytes_of(size.out_type);
  out_ = std::make_unique<DeviceBuffer>(out_bytes() + 2 * kMarginElements * bytes_of(size.out_type));
  problem_.out = out_->as<uint8_t>() + out_begin_;
  poison_out();
  check(cudaDeviceSynchronize(), "making inputs");
}

size_t LceInputs::out_bytes() const {
  return problem_.batch * problem_.m * problem_.n * bytes_of(problem_.out_type);
}

size_t LceInputs::input_bytes() const {
  size_t bytes = 0;
  for (const auto& buffer : buffers_) {
    bytes += buffer->bytes();
  }
  return bytes;
}

void LceInputs::upload_index(size_t term, cudaStream_t stream) {
  check(cudaMemcpyAsync(device_indices_[term], indices_[term].data(), indices_[term].size() * sizeof(int32_t),
                        cudaMemcpyHostToDevice, stream),
        "uploading an index");
}

void LceInputs::poison_out(cudaStream_t stream) {
  check(cudaMemsetAsync(out_->as(), 0xff, out_->bytes(), stream), "poisoning the output");
}

void LceInputs::fill_row_with_nan(int term, int64_t row) {
  const LinearCompressionTerm& of = term < 0 ? problem_.candidate : problem_.broadcast[term];
  auto* e = static_cast<uint16_t*>(const_cast<void*>(of.e)) + row * of.e_batch_stride;
  check(cudaMemset(e, 0xff, of.e_batch_stride * sizeof(uint16_t)), "filling a row with NaN");
}

std::vector<uint8_t> LceInputs::download_out() const {
  std::vector<uint8_t> all(out_->bytes());
  check(cudaMemcpy(all.data(), out_->as(), all.size(), cudaMemcpyDeviceToHost), "downloading the output");
  const auto begin = all.begin() + out_begin_;
  const auto end = begin + static_cast<int64_t>(out_bytes());
  const auto is_poison = [](uint8_t byte) { return byte == 0xff; };
  if (!std::all_of(all.begin(), begin, is_poison) || !std::all_of(end, all.end(), is_poison)) {
    throw std::runtime_error("something was written outside the output");
  }
  return {begin, end};
}

Comparison compare(const LinearCompressionProblem& problem, const double* reference) {
  Comparison result;
  result.elements = problem.batch * problem.m * problem.n;
  if (result.elements == 0) {
    return result;
  }
  int64_t k = problem.candidate.k;
  for (const LinearCompressionTerm& term : problem.broadcast) {
    k += term.k;
  }
  // Sums of products of deviation about 1, each of K roundings in fp32 of a partial sum of at most a few units.
  const double floor =
      1e-6 + 1e-6 * std::sqrt(static_cast<double>(k)) + (problem.type == ScalarType::kFloat16 ? 3e-8 : 0);
  const double half_ulp = problem.out_type == ScalarType::kFloat32   ? 0x1p-23
                          : problem.out_type == ScalarType::kFloat16 ? 0x1p-11
                                                                     : 0x1p-8;
  DeviceBuffer counts(3 * sizeof(unsigned long long));
  DeviceBuffer sums(2 * sizeof(double));
  check(cudaMemset(counts.as(), 0, 3 * sizeof(unsigned long long)), "cudaMemset");
  check(cudaMemset(sums.as(), 0, 2 * sizeof(double)), "cudaMemset");
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((result.elements + 255) / 256, 4096));
  const auto run = [&](const auto* out) {
    compare_kernel<<<blocks, 256>>>(out, reference, result.elements, half_ulp, floor, counts.as<unsigned long long>(),
                                    sums.as<double>());
  };
  if (problem.out_type == ScalarType::kFloat32) {
    run(static_cast<const float*>(problem.out));
  } else if (problem.out_type == ScalarType::kFloat16) {
    run(static_cast<const __half*>(problem.out));
  } else {
    run(static_cast<const __nv_bfloat16*>(problem.out));
  }
  check(cudaGetLastError(), "comparing");
  unsigned long long host_counts[3];
  double host_sums[2];
  check(cudaMemcpy(host_counts, counts.as(), sizeof(host_counts), cudaMemcpyDeviceToHost), "comparing");
  check(cudaMemcpy(host_sums, sums.as(), sizeof(host_sums), cudaMemcpyDeviceToHost), "comparing");
  result.wrong_nans = static_cast<int64_t>(host_counts[0]);
  result.nans = static_cast<int64_t>(host_counts[1]);
  result.outside = static_cast<int64_t>(host_counts[2]);
  result.root_mean_square = std::sqrt(host_sums[0] / static_cast<double>(result.elements));
  result.largest = host_sums[1];
  return result;
}

}  // namespace ikbo::testing
