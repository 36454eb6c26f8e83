#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "graph/specification.h"

namespace ikbo::transform {

enum class Mode {
  kIkbo,       // user work at the user batch, broadcast sunk as far as it goes, IKBO operators
  kSplit,      // net-splitting: user work at the user batch, broadcast at the boundary, nothing sunk
  kBroadcast,  // system-level broadcast: every request-only input is copied first, then the original model
};
Mode parse_mode(const std::string& name);  // throws ikbo::Error
std::string mode_name(Mode mode);

struct Options {
  Mode mode = Mode::kIkbo;
  /// What is request-only: names or shell patterns of inputs ("user_*"), full paths ("x['user_id']"), graph values
  /// ("x_user_id"), or column ranges of a packed input ("X[:,0:17]"). Several in one string are separated by commas.
  std::vector<std::string> request_only;
  /// For a model that looks up request-only rows by an input of its own (x_user[index]): that input's name. The result
  /// then takes what the original takes.
  std::string index;
  std::optional<std::int64_t> max_users;
  std::optional<std::int64_t> max_candidates;
};

/// Why something stayed at the candidate batch: one row a broadcast, for the report.
struct Stop {
  std::string value;   // the request-only value that had to be broadcast
  std::string node;    // the operator in front of which it was
  std::string target;  // its operator
  std::string reason;
  std::string shape;  // of the broadcast result
};

struct Report {
  std::vector<Stop> stops;
  std::vector<std::string> warnings;  // batch statistics, random operators, unused inputs, ...
  int nodes_before = 0;
  int nodes_after = 0;
  int at_user_batch = 0;
  int at_candidate_batch = 0;
  int ikbo_operators = 0;
  int broadcasts = 0;
};

struct Result {
  graph::Archive archive;
  graph::Specification specification;  // also in archive.extra_files
  Report report;
};

/// Rewrites an exported program whose inputs share one batch size so that request-only inputs come with one row a user:
/// transformed(user rows, candidate rows, candidate_to_user) equals original(user rows[candidate_to_user], candidate
/// rows). Request-only inputs may have a batch of 1 that the model expands itself: the result then equals what the
/// original gives for each user's row and that user's candidates, put together. The archive is not changed; the result
/// shares its weights' storage. Throws ikbo::Error where the input, the names or the graph do not allow it.
Result transform(const graph::Archive& archive, const Options& options);

}  // namespace ikbo::transform
