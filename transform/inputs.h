#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/program.h"
#include "graph/specification.h"
#include "transform/jagged.h"

namespace ikbo::transform {

/// What `--request-only` selected: whole inputs, or column ranges of packed ones. Keys are graph values.
struct RequestOnly {
  std::map<std::string, bool> whole;
  std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> columns;  // sorted, half-open, disjoint
};

/// Matches names, shell patterns, paths and column ranges against the inputs. Throws ikbo::Error, with the list of
/// inputs, for what matches nothing, for ranges outside an input or marked twice, and where nothing or everything is
/// selected.
RequestOnly select_request_only(const graph::Program& program, const std::vector<graph::UserInput>& inputs,
                                const std::vector<std::string>& patterns);

/// Which batch each input follows, and what the whole program's batch is.
struct InputSides {
  std::vector<graph::InputEntry> inputs;  // in the program's order
  std::string candidate_symbol;
  std::vector<std::string> symbols;    // of all batches, the candidates' among them
  std::set<std::string> user_symbols;  // of request-only rows that the model looks up through `index`
  std::set<std::string> single;        // request-only inputs with a batch of 1, which the model broadcasts itself
  std::string index;                   // the model's own candidate_to_user; empty: it has none
  std::vector<JaggedBags> jagged;      // inputs that are bags of many lengths
  bool broadcasts_inside() const { return !single.empty() || !index.empty(); }
};

/// Throws ikbo::Error where an input has no batch that it could follow, or none is left that differs from candidate to
/// candidate. `index` names the input that request-only rows are looked up by; empty where there is none.
InputSides sides_of(const graph::Program& program, const std::vector<graph::UserInput>& inputs,
                    const RequestOnly& request_only, const std::string& index);

}  // namespace ikbo::transform
