#pragma once

#include <ATen/core/jit_type.h>

#include <map>
#include <string>

#include "graph/program.h"
#include "runtime/plan.h"

namespace ikbo::runtime {

/// What a value of the graph is bound to: a slot, or a weight as a constant.
using Bindings = std::map<std::string, Source>;

/// Turns an argument of a node into what the operator's schema wants at that place. Throws ikbo::Error where it cannot;
/// the caller adds node and argument.
Source bind_argument(const graph::Argument& argument, const c10::TypePtr& type, const Bindings& bindings,
                     const PlanOptions& options);

/// The same for arguments of native operators, which have no schema.
Source bind_untyped(const graph::Argument& argument, const Bindings& bindings);

}  // namespace ikbo::runtime
