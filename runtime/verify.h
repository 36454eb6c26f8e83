#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "runtime/engine.h"
#include "runtime/requests.h"

namespace ikbo::runtime {

struct VerifyOptions {
  std::uint64_t seed = 0;
  std::int64_t users = 5;        // of the main checks; small ones are added
  std::int64_t candidates = 64;  // likewise
  std::string device = "cpu";    // that all three run on, as open_device takes it
  bool allow_dead = false;       // a model whose scores do not move is no failure
  int threads = 0;
  std::vector<Request> requests;  // inputs from a file instead of random ones
  std::function<void(const std::string&)> progress;
};

/// One comparison: original and transformed on the same rows, both against the original in float64.
struct VerifyCheck {
  std::string mapping;  // "even", "uneven", "unsorted", "requests"
  std::int64_t users = 0;
  std::int64_t candidates = 0;
  std::string output;
  double original_error = 0;     // largest, against the float64 reference; 0 where there is none
  double transformed_error = 0;  // likewise; against the original where there is no reference
  double allowed = 0;            // what transformed_error may be
  double range = 0;              // of the reference's scores
  bool nan_agree = true;
  bool passed = false;
};

struct VerifyResult {
  bool float64 = false;         // a float64 reference was possible
  std::string why_not_float64;  // else the reason
  bool user_inputs_move_scores = false;
  bool candidate_inputs_move_scores = false;
  bool has_user_inputs = false;
  bool has_candidate_inputs = false;
  std::vector<VerifyCheck> checks;
  /// Sizes at which the original itself fails (a model that squeezes its batch away): nothing to compare there.
  std::vector<std::string> skipped;
  bool dead() const {
    return (has_user_inputs && !user_inputs_move_scores) || (has_candidate_inputs && !candidate_inputs_move_scores);
  }
  bool passed(bool allow_dead) const;
  /// Largest transformed_error / max(original_error, slack) over the checks.
  double worst_ratio = 0;
};

/// Shows that transformed(user rows, candidate rows, index) equals original(user rows[index], candidate rows) within
/// rounding: the transformed model's error against the original in float64 may be at most twice the original's own,
/// plus a few units in the last place of the scores' range. A model that spreads one user's row by itself is run once a
/// user, on that user's candidates. Where the original cannot run in float64, 1e-5 of that
/// range. Throws ikbo::Error where either cannot run at all.
VerifyResult verify(const graph::Archive& original, const graph::Archive& transformed, const VerifyOptions& options);

}  // namespace ikbo::runtime
