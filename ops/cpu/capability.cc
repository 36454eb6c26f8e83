#include "ops/cpu/capability.h"

#include <ATen/Version.h>

#include <string>

namespace ikbo::cpu {

Capability capability() {
#if defined(IKBO_X86_KERNELS)
  static const Capability kChosen = [] {
    const std::string name = at::get_cpu_capability();
    if (name == "AVX512") return Capability::kAvx512;
    return name == "AVX2" ? Capability::kAvx2 : Capability::kDefault;
  }();
  return kChosen;
#else
  return Capability::kDefault;
#endif
}

}  // namespace ikbo::cpu
