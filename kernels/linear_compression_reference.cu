#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/linear_compression_reference.h"

namespace ikbo::kernels {
namespace {

struct Terms {
  LinearCompressionTerm term[kMaxBroadcastTerms + 1];
  int count;
};

// Threads of a block share a row of W and read consecutive columns of E.
template <typename T>
__global__ void reference_kernel(const __grid_constant__ Terms terms, int64_t batch, int64_t m, int64_t n,
                                 double* out) {
  const int64_t elements = batch * m * n;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t column = i % n;
    const int64_t row = i / n % m;
    const int64_t candidate = i / n / m;
    double sum = 0;
    for (int t = 0; t < terms.count; ++t) {
      const LinearCompressionTerm& term = terms.term[t];
      const int64_t source = term.index == nullptr ? candidate : term.index[candidate];
      if (source < 0 || source >= term.rows) {
        sum = __longlong_as_double(0x7ff8'0000'0000'0000);
        break;
      }
      const T* w = static_cast<const T*>(term.w) + row * term.w_row_stride;
      const T* e = static_cast<const T*>(term.e) + source * term.e_batch_stride + column;
      for (int64_t k = 0; k < term.k; ++k) {
        sum += static_cast<double>(static_cast<float>(w[k])) *
               static_cast<double>(static_cast<float>(e[k * term.e_row_stride]));
      }
    }
    out[i] = sum;
  }
}

}  // namespace

void linear_compression_reference(const LinearCompressionProblem& problem, double* out, cudaStream_t stream) {
  const int64_t elements = problem.batch * problem.m * problem.n;
  if (elements == 0) {
    return;
  }
  Terms terms{};
  terms.term[terms.count++] = problem.candidate;
  for (const LinearCompressionTerm& term : problem.broadcast) {
    terms.term[terms.count++] = term;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((elements + 255) / 256, 1 << 20));
  if (problem.type == ScalarType::kFloat16) {
    reference_kernel<__half><<<blocks, 256, 0, stream>>>(terms, problem.batch, problem.m, problem.n, out);
  } else {
    reference_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(terms, problem.batch, problem.m, problem.n, out);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    throw std::runtime_error(std::string("linear_compression_reference: ") + cudaGetErrorString(error));
  }
}

}  // namespace ikbo::kernels
