#include "runtime/plan.h"

#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/reshape.h>
#include <c10/core/InferenceMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "graph/error.h"
#include "runtime/bind_argument.h"

namespace ikbo::runtime {
namespace {

using c10::IValue;
using graph::Node;

std::string node_label(const Node& node) {
  const std::vector<std::string> outputs = graph::output_names(node);
  const std::string name = !node.name.empty() ? node.name : outputs.empty() ? std::string("?") : outputs.front();
  return fmt::format("node '{}' ({})", name, node.target);
}

c10::OperatorHandle resolve(const Node& node) {
  if (node.target.starts_with("torch.ops.higher_order.") || node.target.find("higher_order") != std::string::npos) {
    fail("{}: higher-order operators are not executed here; {}", node_label(node),
         "export the model with .run_decompositions({}) before torch.export.save");
  }
  const std::string prefix = "torch.ops.";
  if (!node.target.starts_with(prefix)) fail("{}: no such operator", node_label(node));
  const std::string rest = node.target.substr(prefix.size());
  const std::size_t first = rest.find('.');
  const std::size_t last = rest.rfind('.');
  if (first == std::string::npos || first == last) fail("{}: no such operator", node_label(node));
  const std::string name = rest.substr(0, first) + "::" + rest.substr(first + 1, last - first - 1);
  std::string overload = rest.substr(last + 1);
  if (overload == "default") overload.clear();
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) {
    fail(
        "{}: no such operator in PyTorch's C++ library; an operator defined in Python or in another library cannot "
        "run here",
        node_label(node));
  }
  return *op;
}

// Batch norm in training mode writes into its running statistics, which its schema does not say.
bool writes_unannounced(const c10::FunctionSchema& schema, const std::string& argument, const Node& node) {
  if (argument != "running_mean" && argument != "running_var") return false;
  if (schema.name().find("functional") != std::string::npos) return false;
  for (const char* flag : {"training", "train", "use_input_stats"}) {
    const graph::Argument* given = node.find(flag);
    if (given == nullptr) continue;
    const bool* value = std::get_if<bool>(given);
    return value == nullptr || *value;
  }
  return false;
}

class Planner {
 public:
  Planner(const graph::Archive& archive, const PlanOptions& options)
      : archive_(archive), graph_(archive.program.graph), options_(options) {}

  Plan make() {
    const c10::InferenceMode inference;
    find_read_values();
    find_written_inputs();
    bind_inputs();
    for (const Node& node : graph_.nodes) add_step(node);
    bind_outputs();
    let_views_copy();
    mark_last_uses();
    return std::move(plan_);
  }

 private:
  int new_slot() { return plan_.slots++; }

  Source slot_source(int slot) {
    Source source;
    source.kind = Source::Kind::kValue;
    source.slot = slot;
    return source;
  }

  // Weights that nothing reads are not loaded.
  void find_read_values() {
    const auto add = [&](const graph::Argument& value) {
      for (const std::string& name : graph::value_names(value)) read_.insert(name);
    };
    for (const Node& node : graph_.nodes) {
      for (const graph::NamedArgument& argument : node.inputs) add(argument.value);
    }
    for (const graph::OutputSpec& spec : archive_.program.output_specs) add(spec.value);
  }

  // Which of the graph's inputs an in-place operator may write into, through any chain of views.
  void find_written_inputs() {
    std::unordered_map<std::string, std::vector<std::string>> alias_of;  // value -> inputs it may share memory with
    for (const graph::InputSpec& spec : archive_.program.input_specs) {
      for (const std::string& name : graph::value_names(spec.value)) alias_of[name] = {name};
    }
    for (const Node& node : graph_.nodes) {
      if (find_native_operator(node.target) != nullptr) continue;
      const c10::OperatorHandle op = resolve(node);
      const c10::FunctionSchema& schema = op.schema();
      std::vector<std::string> reached;
      for (const graph::NamedArgument& argument : node.inputs) {
        const auto position = schema.argumentIndexWithName(argument.name);
        if (!position) continue;
        const c10::AliasInfo* alias = schema.arguments()[*position].alias_info();
        const bool written = (alias != nullptr && alias->isWrite()) || writes_unannounced(schema, argument.name, node);
        for (const std::string& name : graph::value_names(argument.value)) {
          const auto found = alias_of.find(name);
          if (found == alias_of.end()) continue;
          if (written) written_.insert(found->second.begin(), found->second.end());
          if (alias != nullptr) reached.insert(reached.end(), found->second.begin(), found->second.end());
        }
      }
      if (reached.empty()) continue;
      for (const std::string& name : graph::output_names(node)) alias_of[name] = reached;
    }
  }

  at::Tensor load(const graph::Weight& weight) {
    at::Tensor tensor = graph::weight_tensor(weight);
    const bool promote = options_.float64 && at::isFloatingType(tensor.scalar_type());
    if (!promote && options_.device.is_cpu()) return inference_alias(tensor);
    // Tied weights are converted once.
    const std::string key =
        fmt::format("{} {} {} {}", static_cast<const void*>(weight.storage.get()), fmt::join(tensor.sizes(), ","),
                    fmt::join(tensor.strides(), ","), tensor.storage_offset());
    at::Tensor& converted = converted_[key];
    if (!converted.defined()) {
      converted = tensor.to(options_.device, promote ? at::kDouble : tensor.scalar_type());
      converted = inference_alias(converted);
    }
    return converted;
  }

  void bind_inputs() {
    std::unordered_map<std::string, int> user_slots;
    for (const graph::InputSpec& spec : archive_.program.input_specs) {
      switch (spec.kind) {
        case graph::InputKind::kParameter:
        case graph::InputKind::kBuffer:
        case graph::InputKind::kTensorConstant:
          bind_weight(spec);
          break;
        case graph::InputKind::kUserInput:
          // A number that the caller passes has no tensor: a node that reads it is refused as reading nothing.
          if (!std::holds_alternative<graph::TensorArg>(spec.value)) break;
          for (const std::string& name : graph::value_names(spec.value)) {
            const int slot = new_slot();
            user_slots[name] = slot;
            bindings_[name] = slot_source(slot);
            if (written_.contains(name)) plan_.copies.push_back({slot, at::Tensor()});
          }
          break;
        case graph::InputKind::kConstantInput:
          break;
        case graph::InputKind::kCustomObject:
        case graph::InputKind::kToken:
          fail("the model uses custom objects or effect tokens ('{}'), which are not supported", spec.target);
      }
    }
    for (const graph::UserInput& input : graph::user_inputs(archive_.program)) {
      const auto found = user_slots.find(input.value);
      if (found == user_slots.end()) fail("input '{}' is not an input of the graph", input.path);
      plan_.inputs.push_back(found->second);
    }
  }

  void bind_weight(const graph::InputSpec& spec) {
    const std::vector<std::string> names = graph::value_names(spec.value);
    if (names.size() != 1) fail("weight '{}' is not one tensor of the graph", spec.target);
    if (!read_.contains(names.front())) return;
    const auto* weight = find_weight(spec.target);
    if (weight == nullptr) fail("the archive holds no tensor for '{}'", spec.target);
    at::Tensor tensor = load(*weight);
    plan_.weight_storages.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
    if (written_.contains(names.front())) {
      const int slot = new_slot();
      bindings_[names.front()] = slot_source(slot);
      plan_.copies.push_back({slot, std::move(tensor)});
      return;
    }
    Source source;
    source.constant = std::move(tensor);
    bindings_[names.front()] = std::move(source);
  }

  const graph::Weight* find_weight(const std::string& name) const {
    for (const auto* table : {&archive_.weights, &archive_.constants}) {
      const auto found = table->find(name);
      if (found != table->end()) return &found->second;
    }
    return nullptr;
  }

  void add_step(const Node& node) {
    Step step;
    step.node = node.name.empty() && !node.outputs.empty()
                    ? fmt::format("{}", fmt::join(graph::output_names(node), ","))
                    : node.name;
    step.target = node.target;
    step.native = find_native_operator(node.target);
    try {
      if (step.native != nullptr) {
        bind_native(node, step);
      } else {
        step.op = resolve(node);
        bind_schema(node, step);
      }
    } catch (const Error& error) {
      if (std::string_view(error.what()).starts_with("node '")) throw;
      fail("{}: {}", node_label(node), error.what());
    }
    for (const graph::Argument& output : node.outputs) step.results.push_back(bind_result(output));
    plan_.steps.push_back(std::move(step));
  }

  void bind_native(const Node& node, Step& step) {
    if (node.target.starts_with("torch.ops.")) {
      // Registered operators have defaults; their schema gives the order.
      step.op = resolve(node);
      bind_schema(node, step);
      step.op.reset();
      return;
    }
    for (const graph::NamedArgument& argument : node.inputs) {
      step.arguments.push_back(bind_untyped(argument.value, bindings_));
    }
  }

  void bind_schema(const Node& node, Step& step) {
    const c10::FunctionSchema& schema = step.op->schema();
    for (const graph::NamedArgument& argument : node.inputs) {
      if (!schema.argumentIndexWithName(argument.name)) {
        fail("the operator has no argument '{}' in this version of PyTorch: {}", argument.name, c10::toString(schema));
      }
    }
    for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::Argument& formal = schema.arguments()[i];
      const graph::Argument* given = node.find(formal.name());
      Source source;
      if (given != nullptr) {
        try {
          source = bind_argument(*given, formal.type(), bindings_, options_);
        } catch (const Error& error) {
          fail("argument '{}': {}", formal.name(), error.what());
        }
      } else if (formal.default_value()) {
        source.constant = *formal.default_value();
      } else if (formal.type()->kind() != c10::TypeKind::OptionalType) {
        fail("argument '{}' is missing", formal.name());
      }
      // A factory without a device would make its tensor on the CPU.
      if (!options_.device.is_cpu() && formal.name() == "device" && source.constant.isNone()) {
        source.constant = options_.device;
      }
      const bool write = (formal.alias_info() != nullptr && formal.alias_info()->isWrite()) ||
                         writes_unannounced(schema, formal.name(), node);
      if (write) step.written.push_back(i);
      step.arguments.push_back(std::move(source));
    }
    // view.dtype and its like read the bytes of a float32 tensor: with float64 there the result means nothing.
    if (options_.float64 && schema.name() == "aten::view" && schema.overload_name() == "dtype") {
      fail("reinterprets bytes, which cannot be done in float64");
    }
  }

  Step::Result bind_result(const graph::Argument& output) {
    Step::Result result;
    const auto define = [&](const std::string& name) {
      const int slot = new_slot();
      bindings_[name] = slot_source(slot);
      return slot;
    };
    if (const auto* list = std::get_if<graph::TensorListArg>(&output)) {
      result.list = true;
      for (const std::string& name : list->names) result.slots.push_back(define(name));
      return result;
    }
    const std::vector<std::string> names = graph::value_names(output);
    if (names.size() == 1) result.slot = define(names.front());
    return result;
  }

  void bind_outputs() {
    for (const graph::OutputSpec& spec : archive_.program.output_specs) {
      if (!spec.user_output || std::holds_alternative<graph::NoneArg>(spec.value)) continue;
      try {
        plan_.outputs.push_back(bind_untyped(spec.value, bindings_));
      } catch (const Error& error) {
        fail("output {} of the graph: {}", plan_.outputs.size(), error.what());
      }
      const std::vector<std::string> names = graph::value_names(spec.value);
      plan_.output_names.push_back(names.empty() ? "constant" : names.front());
    }
  }

  // A graph says where a tensor could be viewed on the device, in the type and with the strides it was exported with.
  // Elsewhere the same values may lie differently (attention in float64 on a GPU does), and a copy is as good, unless
  // something could be written through the view.
  void let_views_copy() {
    for (const Step& step : plan_.steps) {
      if (!step.written.empty()) return;
    }
    for (Step& step : plan_.steps) {
      if (step.op && step.op->schema().name() == "aten::view" && step.op->schema().overload_name().empty()) {
        step.native = [](torch::jit::Stack& stack) {
          const std::vector<std::int64_t> sizes = stack.back().toIntVector();
          stack.pop_back();
          stack.back() = at::reshape(stack.back().toTensor(), sizes);
        };
      }
    }
  }

  // Walks backwards: the first reader met is the last one to run.
  void mark_last_uses() {
    std::vector<bool> read(static_cast<std::size_t>(plan_.slots), false);
    for (const Source& output : plan_.outputs) {
      if (output.slot >= 0) read[static_cast<std::size_t>(output.slot)] = true;
    }
    for (auto step = plan_.steps.rbegin(); step != plan_.steps.rend(); ++step) {
      for (Step::Result& result : step->results) {
        drop_unread(result.slot, read);
        for (int& slot : result.slots) drop_unread(slot, read);
      }
      for (auto source = step->arguments.rbegin(); source != step->arguments.rend(); ++source) {
        mark(*source, read);
      }
    }
    for (int& slot : plan_.inputs) drop_unread(slot, read);
    for (auto& copy : plan_.copies) drop_unread(copy.slot, read);
  }

  static void drop_unread(int& slot, const std::vector<bool>& read) {
    if (slot >= 0 && !read[static_cast<std::size_t>(slot)]) slot = -1;
  }

  static void mark(Source& source, std::vector<bool>& read) {
    for (auto element = source.elements.rbegin(); element != source.elements.rend(); ++element) mark(*element, read);
    if (source.slot < 0) return;
    source.last = !read[static_cast<std::size_t>(source.slot)];
    read[static_cast<std::size_t>(source.slot)] = true;
  }

  const graph::Archive& archive_;
  const graph::Graph& graph_;
  PlanOptions options_;
  Plan plan_;
  Bindings bindings_;
  std::set<std::string> read_;     // values of the graph that something reads
  std::set<std::string> written_;  // inputs that an in-place operator may write into
  std::map<std::string, at::Tensor> converted_;
};

}  // namespace

at::Tensor inference_alias(const at::Tensor& tensor) {
  const c10::InferenceMode inference;
  // `key_set` without the autograd keys is what an inference tensor has; the constructor drops them in this mode.
  at::Tensor alias =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

Plan make_plan(const graph::Archive& archive, const PlanOptions& options) {
  return Planner(archive, options).make();
}

}  // namespace ikbo::runtime
