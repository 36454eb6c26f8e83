#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/configurations.h"
#include "graph/program.h"

namespace ikbo::graph {

/// Which batch an input, or an operator's result, follows.
enum class Side {
  kRequestOnly,  // one row a request: B_user
  kCandidate,    // one row a candidate: B_cand
  kShared,       // no batch: one tensor for the whole call
  kIndex,        // candidate_to_user
};

struct InputEntry {
  std::string value;  // in the graph
  std::string name;   // as the model's author knows it
  std::string path;
  Side side = Side::kShared;
};

/// A packed input matrix whose request-only columns were split off: the original columns are those of `user_value` at
/// `user_columns` (half-open ranges, in order) and those of `candidate_value` at all others.
struct PackedInput {
  std::string name;  // of the original input, e.g. "X"
  std::string user_value;
  std::string candidate_value;
  std::vector<std::pair<std::int64_t, std::int64_t>> user_columns;
  std::int64_t columns = 0;
};

/// Bags of many lengths (EmbeddingBag over values and offsets): the entries of all rows one after the other, and where
/// each row's begin. A row's bag is what belongs to a user or candidate; values have no rows of their own.
struct JaggedInput {
  std::vector<std::string> values;  // inputs with one entry (of any shape) in dimension 0 for each of a bag's; none
                                    // where nothing reads the offsets
  std::string offsets;              // the input that says where each bag begins
  bool includes_end = false;        // offsets have one more entry: where the last bag ends
};

/// How an operator came to where it runs.
enum class Role {
  kConstant,     // depends on no batch
  kRequestOnly,  // moved to the user batch
  kCandidate,    // as in the original, at the candidate batch
  kIkbo,         // a standard operator replaced by an IKBO one
  kBroadcast,    // copies user rows to candidates: ikbo::broadcast
  kReplicated,   // request-only, but run at the candidate batch (modes `broadcast` and `split` have these)
};
std::string role_name(Role role);

struct DimEntry {
  std::string expression;  // "B_user", "50*B_cand", "32"
  std::string source;      // "candidate_to_user.size(0)", "weight", "export", ...
};
struct ResultEntry {
  std::string value;
  std::string dtype;
  std::vector<DimEntry> dims;
};
struct OperatorEntry {
  std::string node;
  std::string target;
  Role role = Role::kCandidate;
  std::string note;  // why it is where it is, for broadcasts and replacements
  std::vector<ResultEntry> results;
};

/// The compilation specification of a transformed archive, kept in it as the extra file "ikbo.json".
struct Specification {
  static constexpr int kVersion = 1;
  static constexpr const char* kFile = "ikbo.json";

  std::string mode;              // "ikbo", "split", "broadcast"
  std::string user_symbol;       // symbol of B_user in the archive's sizes
  std::string candidate_symbol;  // symbol of B_cand
  Range user_range;
  Range candidate_range;
  std::vector<InputEntry> inputs;
  std::vector<PackedInput> packed;
  std::vector<JaggedInput> jagged;
  std::vector<OperatorEntry> operators;
  /// Which configurations of kernels `ikbo tune` found the fastest, a device each; empty where nothing was measured.
  std::vector<MeasuredDevice> configurations;
};

Json specification_to_json(const Specification& specification);
/// Throws ikbo::Error for a version or content that is not understood.
Specification specification_from_json(const Json& json);

}  // namespace ikbo::graph
