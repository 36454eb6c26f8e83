#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "graph/error.h"
#include "runtime/allocations.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/input_checks.h"
#include "runtime/model.h"
#include "runtime/plan.h"
#include "runtime/thread_budget.h"

namespace ikbo::runtime {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Slots = std::vector<IValue>;

std::vector<graph::JaggedInput> jagged_of(const graph::Archive& archive) {
  return is_transformed(archive) ? specification_of(archive).jagged : std::vector<graph::JaggedInput>();
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Operators whose result type comes from the default type (a mean of integers, a fresh tensor without a type) give
/// float64 while this lives. The default is global: such runs exclude each other, and should not overlap with others.
class DefaultDouble {
 public:
  explicit DefaultDouble(bool active) : active_(active) {
    if (!active_) return;
    mutex().lock();
    previous_ = c10::get_default_dtype();
    c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  }
  ~DefaultDouble() {
    if (!active_) return;
    c10::set_default_dtype(previous_);
    mutex().unlock();
  }
  DefaultDouble(const DefaultDouble&) = delete;
  DefaultDouble& operator=(const DefaultDouble&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  bool active_;
  caffe2::TypeMeta previous_;
};

IValue take(const Source& source, Slots& slots) {
  if (source.slot < 0) return source.constant;
  IValue& slot = slots[static_cast<std::size_t>(source.slot)];
  return source.last ? std::move(slot) : slot;
}

double number(const IValue& value) {
  if (value.isDouble()) return value.toDouble();
  return value.isBool() ? static_cast<double>(value.toBool()) : static_cast<double>(value.toInt());
}

void push(const Source& source, Slots& slots, Stack& stack) {
  switch (source.kind) {
    case Source::Kind::kConstant:
      stack.push_back(source.constant);
      return;
    case Source::Kind::kValue:
      stack.push_back(take(source, slots));
      return;
    case Source::Kind::kTensors: {
      c10::List<at::Tensor> list;
      list.reserve(source.elements.size());
      for (const Source& element : source.elements) list.push_back(take(element, slots).toTensor());
      stack.emplace_back(std::move(list));
      return;
    }
    case Source::Kind::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(source.elements.size());
      for (const Source& element : source.elements) list.push_back(take(element, slots).toOptional<at::Tensor>());
      stack.emplace_back(std::move(list));
      return;
    }
    case Source::Kind::kInts: {
      c10::List<std::int64_t> list;
      list.reserve(source.elements.size());
      for (const Source& element : source.elements) list.push_back(take(element, slots).toInt());
      stack.emplace_back(std::move(list));
      return;
    }
    case Source::Kind::kDoubles: {
      c10::List<double> list;
      list.reserve(source.elements.size());
      for (const Source& element : source.elements) list.push_back(number(take(element, slots)));
      stack.emplace_back(std::move(list));
      return;
    }
    case Source::Kind::kDouble:
      stack.emplace_back(number(take(source, slots)));
      return;
    case Source::Kind::kNumberTensor:
      stack.emplace_back(at::native::wrapped_scalar_tensor(take(source, slots).toScalar()));
      return;
  }
}

void collect_storages(const IValue& value, std::vector<const c10::StorageImpl*>& storages) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) storages.push_back(tensor.storage().unsafeGetStorageImpl());
  } else if (value.isTensorList() || value.isList()) {
    for (const IValue& element : value.toListRef()) collect_storages(element, storages);
  }
}

class EagerEngine final : public Engine {
 public:
  EagerEngine(const graph::Archive& archive, const EngineOptions& options)
      : device_(open_device(options.device)),
        float64_(options.float64),
        plan_(make_plan(archive, {device_, float64_})),
        checks_(archive.program, jagged_of(archive), device_, float64_),
        budget_(options.threads, options.concurrent) {}

  std::vector<at::Tensor> run(std::span<const at::Tensor> inputs) const override {
    checks_.check(inputs);
    const ThreadBudget::Place place(budget_, budget_.threads_per_run());
    return execute(inputs, nullptr);
  }

  std::vector<at::Tensor> run_profiled(std::span<const at::Tensor> inputs,
                                       std::vector<NodeCost>& costs) const override {
    checks_.check(inputs);
    // One thread: an allocation on a worker thread would not be counted.
    const ThreadBudget::Place place(budget_, 1);
    costs.clear();
    return execute(inputs, &costs);
  }

 private:
  std::vector<at::Tensor> execute(std::span<const at::Tensor> inputs, std::vector<NodeCost>* costs) const {
    const c10::InferenceMode inference;
    const DefaultDouble default_double(float64_);
    Slots slots(static_cast<std::size_t>(plan_.slots));
    load_inputs(inputs, slots);
    Stack stack;
    stack.reserve(32);
    const Step* step = nullptr;
    try {
      if (costs == nullptr) {
        for (const Step& current : plan_.steps) {
          step = &current;
          execute_step(current, slots, stack, inputs);
        }
      } else {
        AllocationCount allocations;
        for (const Step& current : plan_.steps) {
          step = &current;
          profile_step(current, slots, stack, inputs, allocations, *costs);
        }
      }
      step = nullptr;
      return collect_outputs(slots);
    } catch (const c10::Error& error) {
      rethrow(step, error.what_without_backtrace());
    } catch (const std::exception& error) {
      rethrow(step, error.what());
    }
  }

  [[noreturn]] static void rethrow(const Step* step, const std::string& cause) {
    if (step == nullptr) fail("{}", first_line(cause));
    fail("node '{}' ({}): {}", step->node, step->target, first_line(cause));
  }

  void load_inputs(std::span<const at::Tensor> inputs, Slots& slots) const {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const int slot = plan_.inputs[i];
      if (slot < 0) continue;
      const bool promote = float64_ && at::isFloatingType(inputs[i].scalar_type());
      // An operator may ask for float64 of a tensor that has it already and get the caller's own back: nothing here
      // writes into it, since inputs that the graph writes into are copied below.
      slots[static_cast<std::size_t>(slot)] = inference_alias(promote ? inputs[i].to(at::kDouble) : inputs[i]);
    }
    for (const CopiedInput& copy : plan_.copies) {
      if (copy.slot < 0) continue;
      IValue& slot = slots[static_cast<std::size_t>(copy.slot)];
      slot = (copy.weight.defined() ? copy.weight : slot.toTensor()).clone();
    }
  }

  void push_arguments(const Step& step, Slots& slots, Stack& stack, std::span<const at::Tensor> inputs) const {
    stack.clear();
    for (const Source& source : step.arguments) push(source, slots, stack);
    for (const std::size_t written : step.written) check_writable(stack[written], inputs);
  }

  // The plan copies what it sees an in-place operator write into. A view that no schema declares could hide a weight,
  // which may be a read-only mapping.
  void check_writable(const IValue& value, std::span<const at::Tensor> inputs) const {
    std::vector<const c10::StorageImpl*> storages;
    collect_storages(value, storages);
    for (const c10::StorageImpl* storage : storages) {
      bool foreign = plan_.weight_storages.contains(storage);
      for (const at::Tensor& input : inputs) foreign = foreign || input.storage().unsafeGetStorageImpl() == storage;
      if (foreign) {
        fail("writes into a weight or an input through a view; export the model with .run_decompositions({{}})");
      }
    }
  }

  void call(const Step& step, Stack& stack) const {
    if (step.native != nullptr) {
      step.native(stack);
    } else {
      step.op->callBoxed(stack);
    }
  }

  void store_results(const Step& step, Stack& stack, Slots& slots) const {
    if (stack.size() < step.results.size()) {
      fail("gives {} results where the graph has {}", stack.size(), step.results.size());
    }
    for (std::size_t i = 0; i < step.results.size(); ++i) {
      const Step::Result& result = step.results[i];
      if (!result.list) {
        if (result.slot >= 0) slots[static_cast<std::size_t>(result.slot)] = std::move(stack[i]);
        continue;
      }
      const auto elements = stack[i].toListRef();
      if (elements.size() != result.slots.size()) {
        fail("gives a list of {} tensors where the graph has {}", elements.size(), result.slots.size());
      }
      for (std::size_t k = 0; k < elements.size(); ++k) {
        if (result.slots[k] >= 0) slots[static_cast<std::size_t>(result.slots[k])] = elements[k];
      }
    }
    stack.clear();
  }

  void execute_step(const Step& step, Slots& slots, Stack& stack, std::span<const at::Tensor> inputs) const {
    push_arguments(step, slots, stack, inputs);
    call(step, stack);
    store_results(step, stack, slots);
  }

  void profile_step(const Step& step, Slots& slots, Stack& stack, std::span<const at::Tensor> inputs,
                    AllocationCount& allocations, std::vector<NodeCost>& costs) const {
    push_arguments(step, slots, stack, inputs);
    std::vector<const c10::StorageImpl*> known;
    for (const IValue& value : stack) collect_storages(value, known);
    allocations.reset();
    const auto start = std::chrono::steady_clock::now();
    call(step, stack);
    synchronize(device_);
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    NodeCost cost{step.node, step.target, elapsed.count(), allocations.bytes(), 0, allocations.peak()};
    std::vector<const c10::StorageImpl*> made;
    for (const IValue& value : stack) collect_storages(value, made);
    for (const c10::StorageImpl* storage : made) {
      if (std::find(known.begin(), known.end(), storage) != known.end()) continue;
      known.push_back(storage);
      cost.output_bytes += static_cast<std::int64_t>(storage->nbytes());
    }
    costs.push_back(std::move(cost));
    store_results(step, stack, slots);
  }

  std::vector<at::Tensor> collect_outputs(Slots& slots) const {
    std::vector<at::Tensor> outputs;
    outputs.reserve(plan_.outputs.size());
    for (const Source& source : plan_.outputs) {
      const IValue value = source.slot < 0 ? source.constant : slots[static_cast<std::size_t>(source.slot)];
      if (!value.isTensor()) {
        outputs.push_back(at::scalar_tensor(value.toScalar()));
        continue;
      }
      const at::Tensor& tensor = value.toTensor();
      // A weight handed out as it is would let the caller write into the archive's mapping.
      const bool weight =
          tensor.has_storage() && plan_.weight_storages.contains(tensor.storage().unsafeGetStorageImpl());
      outputs.push_back(weight ? tensor.clone() : tensor);
    }
    return outputs;
  }

  c10::Device device_;
  bool float64_;
  Plan plan_;
  InputChecks checks_;
  mutable ThreadBudget budget_;
};

}  // namespace

std::unique_ptr<Engine> make_eager_engine(const graph::Archive& archive, const EngineOptions& options) {
  return std::make_unique<EagerEngine>(archive, options);
}

}  // namespace ikbo::runtime
