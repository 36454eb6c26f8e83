#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/program.h"

namespace ikbo::graph {

/// What `ikbo tune` found at one point of an operator's batches.
struct MeasuredPoint {
  std::int64_t candidates = 0;     // rows of the candidates' operand
  std::vector<std::int64_t> rows;  // of each broadcast term's operand
  int block_m = 0;                 // the fastest configuration of the kernel
  int cluster = 1;
  double microseconds = 0;
  double by_model_microseconds = 0;  // of the configuration that would be chosen without measuring
};

/// The points of all ikbo::linear_compression that have these sizes. W (m, k), E (rows, k, n).
struct MeasuredCompression {
  std::string dtype;  // "bfloat16" or "float16"
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k_candidate = 0;
  std::vector<std::int64_t> k_broadcast;  // one a broadcast term
  std::vector<MeasuredPoint> points;

  bool same_shape(const MeasuredCompression& other) const;
};

/// What was measured on one kind of device. It holds for no other.
struct MeasuredDevice {
  std::string device;  // its name as CUDA gives it: "NVIDIA H200"
  int multiprocessors = 0;
  std::vector<MeasuredCompression> linear_compression;
};

Json measured_to_json(const std::vector<MeasuredDevice>& devices);
/// Reads the list that the specification has under "configurations". Members that are not known are left out. Throws
/// ikbo::Error naming the place of what is missing, of the wrong type or out of range; whether a kernel has a
/// configuration is for whoever owns the kernel to say.
std::vector<MeasuredDevice> measured_from_json(const Json& json);

}  // namespace ikbo::graph
