// Element types that the kernels take.
#pragma once

namespace ikbo::kernels {

enum class ScalarType { kFloat16, kBFloat16, kFloat32, kFloat64 };

}  // namespace ikbo::kernels
