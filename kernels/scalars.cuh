// Element types on the device: the type that sums are kept in, conversions, and dispatch from a run-time type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/scalar_type.h"

namespace ikbo::kernels {

template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ SumOf<T> widen(T value) {
  return static_cast<SumOf<T>>(value);
}

// One rounding, to nearest even.
template <typename T>
__device__ __forceinline__ T narrow(SumOf<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

template <typename Sum>
__device__ __forceinline__ Sum quiet_nan() {
  if constexpr (std::is_same_v<Sum, double>) {
    return __longlong_as_double(0x7ff8'0000'0000'0000);
  } else {
    return __int_as_float(0x7fc0'0000);
  }
}

template <typename Sum>
__device__ __forceinline__ Sum infinity() {
  if constexpr (std::is_same_v<Sum, double>) {
    return __longlong_as_double(0x7ff0'0000'0000'0000);
  } else {
    return __int_as_float(0x7f80'0000);
  }
}

// Calls f(T{}) with the element type that `type` names.
template <typename F>
void with_scalar(ScalarType type, F&& f) {
  switch (type) {
    case ScalarType::kFloat16:
      return f(__half{});
    case ScalarType::kBFloat16:
      return f(__nv_bfloat16{});
    case ScalarType::kFloat32:
      return f(float{});
    case ScalarType::kFloat64:
      return f(double{});
  }
}

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(error));
  }
}

}  // namespace ikbo::kernels
