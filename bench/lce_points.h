// Every configuration of linear compression at the points that `ikbo tune ARCHIVE` asks for.
#pragma once

#include <string>
#include <vector>

#include "tests/gpu/lce_inputs.h"

namespace ikbo::bench {

// "bf16,433,256,866,1024,15x1178;..." : points by semicolons, each of type, M, N, K_cand, candidates and, for every
// broadcast term, its rows and K. Throws std::invalid_argument naming what is wrong.
std::vector<testing::LceSize> parse_points(const std::string& text);

// Measures the points in order on device 0 and prints a line of JSON for the device, then one for each point as soon as
// it is done: every configuration's microseconds, and the one that would be chosen without measuring.
void measure_points(const std::vector<testing::LceSize>& points, int rounds);

}  // namespace ikbo::bench
