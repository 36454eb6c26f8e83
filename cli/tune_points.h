#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"

namespace ikbo::cli {

/// Numbers of candidates and users at which to measure; empty lists for the usual ones.
struct TuneRequest {
  std::vector<std::int64_t> candidates;
  std::vector<std::int64_t> users;  // every number with every number of candidates that is no smaller
  std::int64_t ratio = 70;          // candidates a user, where `users` is empty
};

/// What to measure: the shapes of an archive's linear compressions, each once, at points without a configuration.
struct TunePlan {
  std::vector<graph::MeasuredCompression> shapes;
  std::vector<std::string> skipped;  // operators that have no configurations to choose among, and why

  std::size_t points() const;
};

/// Throws ikbo::Error where the archive has no linear compression that could be measured, and where no point, or one
/// that was asked for, lies in the specification's ranges.
TunePlan plan_tuning(const graph::Archive& archive, const graph::Specification& specification,
                     const TuneRequest& request);

/// Puts what was measured into the specification: in place of all that it has for that device, beside what it has for
/// others.
void store(graph::Specification& specification, graph::MeasuredDevice measured);

}  // namespace ikbo::cli
