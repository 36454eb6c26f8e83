#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/program.h"

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

}  // namespace ikbo::transform
