#pragma once

#include <c10/core/Device.h>

#include <string>

namespace ikbo::runtime {

/// The device of a name: "cpu", "cuda" (the first GPU) or "cuda:N". For CUDA, PyTorch's CUDA libraries and the
/// operators' CUDA implementations are loaded the first time. Throws ikbo::Error for a name that means nothing, a build
/// without CUDA operators, or a GPU that is not there.
c10::Device open_device(const std::string& name);

/// Waits until all work on the device is done; nothing to do for the CPU.
void synchronize(const c10::Device& device);

}  // namespace ikbo::runtime
