#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/archive.h"

namespace ikbo::runtime {

/// A scalar operator that is evaluated here and not through the dispatcher: pops its arguments, pushes its result.
using NativeOperator = void (*)(torch::jit::Stack&);
/// The native operator of a target such as "_operator.add"; null where there is none.
NativeOperator find_native_operator(const std::string& target);

/// Where one argument of a step comes from.
struct Source {
  enum class Kind : std::uint8_t {
    kConstant,         // `constant`, built once at load
    kValue,            // a slot
    kTensors,          // list of tensors, one an element
    kOptionalTensors,  // list of tensors or none
    kInts,             // list of integers, some of them slots
    kDoubles,          // list of numbers, some of them slots
    kDouble,           // a slot's number as a double
    kNumberTensor,     // a slot's number as a 0-d tensor, for operators that take a tensor where the graph has a number
  };
  Kind kind = Kind::kConstant;
  bool last = false;  // the slot is not read again: move it
  int slot = -1;
  c10::IValue constant;
  std::vector<Source> elements;
};

/// One operator call.
struct Step {
  std::optional<c10::OperatorHandle> op;
  NativeOperator native = nullptr;
  std::vector<Source> arguments;
  struct Result {
    int slot = -1;  // -1: nobody reads it
    bool list = false;
    std::vector<int> slots;
  };
  std::vector<Result> results;
  std::vector<std::size_t> written;  // arguments that the operator writes into
  std::string node;
  std::string target;
};

/// An input of the graph that an in-place operator writes into: every run works on a copy.
struct CopiedInput {
  int slot = -1;
  at::Tensor weight;  // undefined for a user input
};

/// A graph compiled to steps over a flat vector of slots.
struct Plan {
  std::vector<Step> steps;
  int slots = 0;
  std::vector<int> inputs;  // slot of every user input, in the order of graph::user_inputs; -1: nobody reads it
  std::vector<Source> outputs;
  std::vector<std::string> output_names;
  std::vector<CopiedInput> copies;
  // Owned: the address of a storage that was freed could come back as a caller's.
  std::map<const c10::StorageImpl*, c10::Storage> weight_storages;
};

struct PlanOptions {
  c10::Device device = c10::kCPU;
  bool float64 = false;
};

/// Resolves every operator and builds every constant. Throws ikbo::Error naming the node and the target where an
/// operator is not known or an argument does not fit its schema.
Plan make_plan(const graph::Archive& archive, const PlanOptions& options);

/// An inference tensor on the storage of `tensor`: inside inference mode, views of it cost no bookkeeping.
at::Tensor inference_alias(const at::Tensor& tensor);

}  // namespace ikbo::runtime
