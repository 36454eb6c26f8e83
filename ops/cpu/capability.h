// Which of the instruction sets that the kernels are compiled for this process uses.
#pragma once

namespace ikbo::cpu {

enum class Capability { kDefault, kAvx2, kAvx512 };

/// PyTorch's own choice, so that ATEN_CPU_CAPABILITY moves these kernels too.
Capability capability();

}  // namespace ikbo::cpu

// The instantiation of `function` for this process: IKBO_CPU_KERNEL(row_linear_kernels<T, Out>()).
#if defined(IKBO_X86_KERNELS)
#define IKBO_CPU_KERNEL(...)                                                           \
  (::ikbo::cpu::capability() == ::ikbo::cpu::Capability::kAvx512 ? AVX512::__VA_ARGS__ \
   : ::ikbo::cpu::capability() == ::ikbo::cpu::Capability::kAvx2 ? AVX2::__VA_ARGS__   \
                                                                 : DEFAULT::__VA_ARGS__)
#else
#define IKBO_CPU_KERNEL(...) DEFAULT::__VA_ARGS__
#endif
