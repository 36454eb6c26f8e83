#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cli/tune_points.h"

namespace ikbo::cli {

/// The program that measures kernels: named by IKBO_LCE_BENCH, beside this one, or where the build puts it. Throws
/// ikbo::Error where it is in neither place.
std::filesystem::path find_lce_bench();

/// Measures every point of `plan` in a process of its own, on the first GPU, and gives the points with the fastest
/// configuration each. `progress` is told points done and all. Throws ikbo::Error with what the program said where it
/// fails or its answer is not understood.
graph::MeasuredDevice measure_points(const TunePlan& plan, int rounds,
                                     const std::function<void(std::size_t, std::size_t)>& progress = {});

}  // namespace ikbo::cli
