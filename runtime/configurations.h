#pragma once

#include <c10/core/Device.h>

#include "graph/specification.h"

namespace ikbo::runtime {

/// Hands the configurations that were measured on this kind of device to the operators, which use them from then on in
/// the whole process; those of other devices are passed over. `device` as open_device gives it. Throws ikbo::Error for
/// one that no kernel has.
void use_configurations(const graph::Specification& specification, const c10::Device& device);

}  // namespace ikbo::runtime
