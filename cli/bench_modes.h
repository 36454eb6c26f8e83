#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "runtime/engine.h"
#include "runtime/requests.h"

namespace ikbo::cli {

struct BenchOptions {
  std::vector<std::string> request_only;
  std::string index;
  std::string requests;          // file; empty: random inputs
  std::string device = "cpu";    // as runtime::open_device takes it
  std::int64_t users = 15;       // random inputs
  std::int64_t candidates = 70;  // of each user
  int threads = 0;
  double seconds = 5;
  int runs = 20;  // of each mode, at least
  std::uint64_t seed = 0;
  std::function<void(const std::string&)> progress;
};

/// One way to run the model, measured.
struct ModeResult {
  std::string mode;
  double p50_us = 0;
  double p99_us = 0;
  std::int64_t replicated_bytes = 0;  // allocated by operators that hold user rows at the candidate batch
  std::int64_t scratch_bytes = 0;     // allocated inside IKBO operators beyond their results
  std::int64_t peak_bytes = 0;        // in use at a time, beyond weights and inputs
  std::int64_t operators = 0;
  std::vector<runtime::NodeCost> costs;  // of one run on one thread
  double largest_difference = 0;         // of scores, to `broadcast`
  std::optional<double> auc;
  std::optional<double> auc_per_request;
};

struct BaselineResult {
  std::string name;
  std::optional<double> auc;
  std::optional<double> auc_per_request;
};

struct BenchResult {
  std::int64_t users = 0;
  std::int64_t candidates = 0;
  std::int64_t runs = 0;  // timed, of each mode
  int threads = 0;
  double overhead_ns = 0;  // of an operator
  std::vector<ModeResult> modes;
  std::vector<BaselineResult> baselines;
};

/// Runs the model as `broadcast`, `split` and `ikbo` on the same call, interleaved in one process in random order.
BenchResult bench_modes(const graph::Archive& original, const BenchOptions& options);

}  // namespace ikbo::cli
