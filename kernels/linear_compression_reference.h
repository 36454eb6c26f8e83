// The definition of linear compression in float64 on the GPU, slow and simple: what the fast kernels are compared with.
#pragma once

#include "kernels/linear_compression.h"

namespace ikbo::kernels {

// out (B, M, N) of doubles on the device, in place of problem.out.
void linear_compression_reference(const LinearCompressionProblem& problem, double* out, cudaStream_t stream);

}  // namespace ikbo::kernels
