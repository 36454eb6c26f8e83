#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "graph/program.h"

namespace ikbo::graph {

/// A name or an index by which a value lies in its container.
using CallKey = std::variant<std::int64_t, std::string>;

/// One node of `in_spec`, the tree of containers that a call's arguments form.
struct CallTree {
  enum class Kind { kLeaf, kTuple, kList, kDict, kOther };
  Kind kind = Kind::kLeaf;
  std::string type;           // "builtins.dict", "collections.OrderedDict", "my.module.Config", ...
  bool attributes = false;    // children are read as x.name and not as x['name']
  std::vector<CallKey> keys;  // of the children: dict keys or field names where known, else their indices
  std::vector<CallTree> children;
};

/// The call of the whole program: a tuple of (args, kwargs). Throws ikbo::Error where in_spec is missing or damaged.
struct CallSpec {
  CallTree args;
  CallTree kwargs;
};
CallSpec call_spec(const Program& program);

/// The program's inputs that a caller passes or that stand for a constant he passed, in order: one for every leaf.
/// Their indices in Program::input_specs (and so in Graph::inputs).
std::vector<std::size_t> caller_inputs(const Program& program);

}  // namespace ikbo::graph
