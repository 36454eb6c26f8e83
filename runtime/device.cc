#include "runtime/device.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "graph/error.h"

namespace ikbo::runtime {
namespace {

constexpr const char* kCudaOperators = "libikbo_ops_cuda.so";

// A library of its own, so that a program that scores on the CPU does not load PyTorch's CUDA libraries.
void load_cuda_operators() {
  static const std::string error = [] {
    if (dlopen(kCudaOperators, RTLD_NOW | RTLD_GLOBAL) != nullptr) return std::string();
    return std::string(dlerror());
  }();
  if (!error.empty()) {
    fail("device cuda: {} could not be loaded ({}): build with -DIKBO_CUDA=ON", kCudaOperators, error);
  }
}

}  // namespace

c10::Device open_device(const std::string& name) {
  c10::Device device(c10::kCPU);
  try {
    device = c10::Device(name);
  } catch (const c10::Error&) {
    fail("device '{}' is not known: expected \"cpu\", \"cuda\" or \"cuda:N\"", name);
  }
  if (device.is_cpu()) return device;
  if (!device.is_cuda()) fail("device '{}' is not supported: expected \"cpu\", \"cuda\" or \"cuda:N\"", name);
  if (!device.has_index()) device.set_index(0);
  load_cuda_operators();
  const auto devices = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  if (device.index() >= static_cast<int>(devices)) {
    fail("device '{}': {}", name,
         devices == 0 ? "PyTorch finds no GPU" : fmt::format("there are {} GPUs, counted from 0", devices));
  }
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return device;
}

void synchronize(const c10::Device& device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace ikbo::runtime
