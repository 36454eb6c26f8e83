// Configurations of kernels that `ikbo tune` measured, kept for each device of the process.
#pragma once

#include <c10/core/Device.h>

#include "kernels/linear_compression.h"

namespace ikbo::cuda {

/// What serves a problem, and whether it was measured; otherwise it is the kernel's own choice.
struct Choice {
  kernels::LinearCompressionConfig config;
  bool measured = false;
};

/// The choice for a problem on `device`. Any thread may ask while another adds measurements.
Choice choose_config(const kernels::LinearCompressionShape& shape, kernels::ScalarType type, c10::DeviceIndex device);

}  // namespace ikbo::cuda
