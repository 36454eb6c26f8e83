// Raw exports made functional: in-place operators become ordinary ones, and views are made anew after a write.
#include "transform/functional.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <set>

#include "graph/error.h"
#include "transform/editor.h"
#include "transform/rules.h"

namespace ikbo::transform {
namespace {

using graph::Argument;
using graph::Expr;
using graph::Graph;
using graph::NamedArgument;
using graph::Node;
using graph::Program;
using graph::TensorArg;
using graph::TensorMeta;

constexpr const char* kRemedy = "export the model with ep.run_decompositions({}) before saving it";
constexpr const char* kGradMode = "torch.ops.higher_order.wrap_with_set_grad_enabled";

// Whether an operator's result shows its operand's memory.
enum class Sharing { kNone, kView, kPerhaps };

bool is_contiguous(const TensorMeta& meta) {
  return meta.strides == graph::contiguous_strides(meta.sizes);
}

Sharing sharing(const Node& node, const TensorMeta& self, const TensorMeta& result) {
  static const std::set<std::string, std::less<>> kViews{
      "view",      "unsqueeze", "squeeze",      "transpose",        "permute",  "t",       "select", "slice", "expand",
      "alias",     "detach",    "narrow",       "swapaxes",         "swapdims", "numpy_T", "split",  "chunk", "unbind",
      "expand_as", "view_as",   "unsafe_split", "split_with_sizes", "unflatten"};
  const std::string name = aten_name(node.target);
  if (kViews.contains(name)) return Sharing::kView;
  if (name == "reshape" || name == "flatten") return is_contiguous(self) ? Sharing::kView : Sharing::kPerhaps;
  if (name == "contiguous") return is_contiguous(self) ? Sharing::kView : Sharing::kNone;
  if (name == "dropout" || name == "feature_dropout" || name == "alpha_dropout") {
    return is_random(node) ? Sharing::kNone : Sharing::kView;  // at inference the operand itself comes back
  }
  if (name == "to" || name == "type_as") return self.dtype == result.dtype ? Sharing::kPerhaps : Sharing::kNone;
  if (name == "as_strided" || name == "diagonal" || name == "unfold" || name == "view_as_real" ||
      name == "view_as_complex" || name == "movedim") {
    return Sharing::kPerhaps;
  }
  return Sharing::kNone;
}

class Functional {
 public:
  explicit Functional(Program program) : program_(std::move(program)), graph_(program_.graph), names_(graph_) {
    for (const Argument& a : graph_.inputs) {
      for (const std::string& name : graph::value_names(a)) inputs_.insert(name);
    }
  }

  Program run() {
    std::vector<Node> nodes = std::move(graph_.nodes);
    graph_.nodes.clear();
    for (Node& node : nodes) visit(std::move(node));
    for (Argument& a : graph_.outputs) rename(a, nullptr);
    for (graph::OutputSpec& spec : program_.output_specs) rename(spec.value, nullptr);
    return std::move(program_);
  }

 private:
  // A value that shows memory of another one: made from `parent` by `view`.
  struct View {
    std::string parent;
    Node view;
    std::size_t result = 0;  // which of the view's results
    bool certain = true;
  };
  struct Memory {
    int version = 0;      // writes so far
    std::string unclear;  // after a write that not every view is known to see: the node
  };

  const std::string& root(const std::string& name) const {
    const std::string* at = &name;
    for (auto it = views_.find(*at); it != views_.end(); it = views_.find(*at)) at = &it->second.parent;
    return *at;
  }

  // The value that holds what `name` would show now.
  std::string current(const std::string& name, const Node* reader) {
    const Memory& memory = memory_[root(name)];
    const auto now = now_.find(name);
    const int seen = now == now_.end() ? born_[name] : now->second.first;
    if (seen == memory.version) return now == now_.end() ? name : now->second.second;
    if (!memory.unclear.empty()) {
      fail("node '{}' reads '{}', of which it is not known whether node '{}' wrote into it: {}",
           reader != nullptr ? reader->name : "output", name, memory.unclear, kRemedy);
    }
    const auto it = views_.find(name);
    if (it == views_.end()) fail("internal error: the memory of '{}' has no current value", name);
    const View view = it->second;
    if (!view.certain) {
      fail("node '{}' ({}) may or may not share memory with what is written in place later: {}", view.view.name,
           view.view.target, kRemedy);
    }
    Node again = view.view;
    for (NamedArgument& a : again.inputs) rename(a.value, reader);
    again.name = names_.fresh(again.name);
    std::vector<std::string> made;
    const auto place = [&](const std::string& old) {
      const std::string value = names_.fresh(old);
      graph_.tensors.emplace(value, graph_.tensors.at(old));
      made.push_back(value);
      now_[old] = {memory_[root(old)].version, value};
      return value;
    };
    for (Argument& out : again.outputs) {
      if (auto* t = std::get_if<TensorArg>(&out)) {
        t->name = place(t->name);
      } else if (auto* list = std::get_if<graph::TensorListArg>(&out)) {
        for (std::string& n : list->names) n = place(n);
      }
    }
    graph_.nodes.push_back(std::move(again));
    return made.at(view.result);
  }

  void rename(Argument& argument, const Node* reader) {
    const auto tensor = [&](std::string& name) {
      if (graph_.tensors.contains(name)) name = current(name, reader);
    };
    if (auto* t = std::get_if<TensorArg>(&argument)) {
      tensor(t->name);
    } else if (auto* list = std::get_if<graph::TensorListArg>(&argument)) {
      for (std::string& n : list->names) tensor(n);
    } else if (auto* optional = std::get_if<graph::OptionalTensorListArg>(&argument)) {
      for (auto& n : optional->names) {
        if (n) tensor(*n);
      }
    }
  }

  void visit(Node node) {
    if (node.target == kGradMode) return inline_region(node);
    if (is_in_place(node.target)) return write(std::move(node));
    const Node original = node;
    for (NamedArgument& a : node.inputs) rename(a.value, &original);
    std::vector<std::string> results;
    for (const std::string& name : graph::output_names(node)) {
      if (graph_.tensors.contains(name)) results.push_back(name);
    }
    const auto operands = graph::input_names(original);
    const bool viewed = !operands.empty() && !results.empty() && graph_.tensors.contains(operands[0]);
    const Sharing shares =
        viewed ? sharing(original, graph_.tensors.at(operands[0]), graph_.tensors.at(results[0])) : Sharing::kNone;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (shares == Sharing::kNone) continue;
      views_[results[i]] = {operands[0], original, i, shares == Sharing::kView};
      born_[results[i]] = memory_[root(results[i])].version;
    }
    graph_.nodes.push_back(std::move(node));
  }

  void write(Node node) {
    const Node original = node;
    const std::string in_place = aten_name(node.target);
    const auto* self = node.inputs.empty() ? nullptr : std::get_if<TensorArg>(&node.inputs[0].value);
    if (self == nullptr) fail("node '{}' ({}) writes into no single tensor: {}", node.name, node.target, kRemedy);
    const std::string written = self->name;
    const std::string owner = root(written);
    const auto results = graph::output_names(original);
    if (in_place == "detach_") {  // nothing but the gradient changes
      if (!results.empty()) alias(results[0], written);
      return;
    }
    if (inputs_.contains(owner)) {
      fail(
          "node '{}' ({}) writes into '{}', which is an input, a parameter or a buffer: clone it in the model before "
          "writing",
          node.name, node.target, owner);
    }
    static const std::set<std::string, std::less<>> kShapes{"squeeze_", "unsqueeze_", "t_",        "transpose_",
                                                            "resize_",  "set_",       "swapaxes_", "swapdims_"};
    const bool reshapes = kShapes.contains(in_place);
    const std::string name = in_place.substr(0, in_place.size() - 1);
    const std::string overload = aten_overload(node.target);
    const bool exists = c10::Dispatcher::singleton()
                            .findSchema({"aten::" + name, overload == "default" ? std::string() : overload})
                            .has_value();
    if (!exists || in_place == "resize_" || in_place == "set_") {
      fail("node '{}' ({}) has no form that does not work in place: {}", node.name, node.target, kRemedy);
    }
    // The shape of a tensor object changes, not its memory. Who else holds the object is not known to an archive.
    if (reshapes) {
      if (results.empty())
        fail("node '{}' ({}) changes a tensor's shape in place: {}", node.name, node.target, kRemedy);
      node.target = fmt::format("torch.ops.aten.{}.{}", name, overload);
      const Node view = node;
      node.inputs[0].value = TensorArg{current(written, &original)};
      views_[results[0]] = {written, view, 0, true};
      born_[results[0]] = memory_[owner].version;
      graph_.nodes.push_back(std::move(node));
      // Later readers of the old name see the new shape too.
      now_[written] = {memory_[owner].version, results[0]};
      return;
    }
    node.target = fmt::format("torch.ops.aten.{}.{}", name, overload);
    for (NamedArgument& a : node.inputs) rename(a.value, &original);
    const std::string made = results.empty() ? names_.fresh(node.name) : results[0];
    const TensorMeta meta = graph_.tensors.at(written);
    graph_.tensors.insert_or_assign(made, meta);
    node.outputs = {TensorArg{made}};
    const bool converts = promotes(original, meta);
    if (converts) {
      const std::string wide = names_.fresh(made + "_wide");
      graph_.tensors.emplace(wide, meta);
      node.outputs = {TensorArg{wide}};
      node.name = wide;
      graph_.nodes.push_back(std::move(node));
      emit("torch.ops.aten._to_copy.default", {{"self", TensorArg{wide}, 1}, {"dtype", graph::DTypeArg{meta.dtype}, 2}},
           made);
    } else {
      node.name = made;
      graph_.nodes.push_back(std::move(node));
    }
    store(original, written, made);
    if (!results.empty()) alias(results[0], written);
  }

  // The result keeps the operand's type, whatever it is combined with.
  bool promotes(const Node& node, const TensorMeta& self) const {
    static const std::set<std::string, std::less<>> kMasksAndIndices{"masked_fill_",    "index_put_",  "scatter_",
                                                                     "scatter_add_",    "index_fill_", "index_add_",
                                                                     "masked_scatter_", "copy_"};
    if (kMasksAndIndices.contains(aten_name(node.target))) return false;
    for (const std::string& name : graph::input_names(node)) {
      const auto it = graph_.tensors.find(name);
      if (it != graph_.tensors.end() && it->second.dtype != self.dtype) return true;
    }
    return false;
  }

  void alias(const std::string& name, const std::string& of) {
    Node same;
    same.target = "torch.ops.aten.alias.default";
    same.name = name;
    same.inputs = {{"self", TensorArg{of}, 1}};
    same.outputs = {TensorArg{name}};
    graph_.tensors.insert_or_assign(name, graph_.tensors.at(of));
    views_[name] = {of, same, 0, true};
    now_[name] = {memory_[root(of)].version, current(of, nullptr)};
  }

  std::string emit(const std::string& target, std::vector<NamedArgument> inputs, const std::string& name) {
    Node node;
    node.target = target;
    node.inputs = std::move(inputs);
    node.name = name;
    node.outputs = {TensorArg{name}};
    graph_.nodes.push_back(std::move(node));
    return name;
  }

  // `made` is what `written` holds now: put it back into everything that it is a view of.
  void store(const Node& writer, const std::string& written, const std::string& made) {
    const std::string owner = root(written);
    std::vector<std::pair<std::string, std::string>> chain{{written, made}};
    std::string unclear;
    for (std::string at = written; at != owner;) {
      const View& view = views_.at(at);
      std::optional<std::string> whole;
      if (view.certain) whole = put_back(view, at, chain.back().second, current(view.parent, &writer));
      if (!whole) {
        unclear = writer.name;
        break;
      }
      at = view.parent;
      chain.emplace_back(at, *whole);
    }
    Memory& memory = memory_[owner];
    ++memory.version;
    memory.unclear = unclear;
    for (const auto& [name, value] : chain) now_[name] = {memory.version, value};
  }

  // The parent's contents after `part` was written into the view of it; nothing where that is not understood.
  std::optional<std::string> put_back(const View& view, const std::string& viewed, const std::string& part,
                                      const std::string& parent) {
    const std::map<std::string, Batch> none;
    const RuleInput in(graph_, view.view, "", none);
    const std::string name = aten_name(view.view.target);
    const TensorMeta& whole = graph_.tensors.at(view.parent);
    const int rank = static_cast<int>(whole.sizes.size());
    const auto result = [&](const std::string& target, std::vector<NamedArgument> inputs) {
      const std::string value = names_.fresh(parent + "_written");
      graph_.tensors.emplace(value, whole);
      return emit(target, std::move(inputs), value);
    };
    if (name == "alias" || name == "detach" || name == "contiguous" || name.find("dropout") != std::string::npos) {
      return part;
    }
    if (name == "transpose" || name == "swapaxes" || name == "swapdims") {
      return result("torch.ops.aten.transpose.int", {{"self", TensorArg{part}, 1},
                                                     {"dim0", std::int64_t{*in.dim("dim0", rank)}, 1},
                                                     {"dim1", std::int64_t{*in.dim("dim1", rank)}, 1}});
    }
    if (name == "t" || name == "numpy_T") {
      return rank == 2 ? std::optional(result("torch.ops.aten.t.default", {{"self", TensorArg{part}, 1}}))
                       : std::nullopt;
    }
    if (name == "permute") {
      const auto dims = in.integers("dims");
      if (!dims) return std::nullopt;
      std::vector<std::int64_t> inverse(dims->size());
      for (std::size_t i = 0; i < dims->size(); ++i) {
        inverse[static_cast<std::size_t>(((*dims)[i] + rank) % rank)] = static_cast<std::int64_t>(i);
      }
      return result("torch.ops.aten.permute.default", {{"self", TensorArg{part}, 1}, {"dims", inverse, 1}});
    }
    if (name == "select") {
      const auto dim = in.dim("dim", rank);
      const auto index = in.integer("index");
      if (!dim || !index) return std::nullopt;
      return result("torch.ops.aten.select_scatter.default", {{"self", TensorArg{parent}, 1},
                                                              {"src", TensorArg{part}, 1},
                                                              {"dim", std::int64_t{*dim}, 1},
                                                              {"index", *index, 1}});
    }
    if (name == "slice") {
      const auto dim = view.view.find("dim") == nullptr ? std::optional<int>(0) : in.dim("dim", rank);
      if (!dim) return std::nullopt;
      if (graph_.tensors.at(viewed).sizes == whole.sizes) return part;  // all of it
      std::vector<NamedArgument> inputs{
          {"self", TensorArg{parent}, 1}, {"src", TensorArg{part}, 1}, {"dim", std::int64_t{*dim}, 1}};
      for (const char* bound : {"start", "end", "step"}) {
        if (const Argument* a = view.view.find(bound)) inputs.push_back({bound, *a, 1});
      }
      return result("torch.ops.aten.slice_scatter.default", std::move(inputs));
    }
    if (name == "view" || name == "reshape" || name == "flatten" || name == "unflatten" || name == "unsqueeze" ||
        name == "squeeze") {
      std::vector<std::int64_t> sizes;
      for (const Expr& e : whole.sizes) sizes.push_back(e.as_integer().value_or(-1));
      if (std::count(sizes.begin(), sizes.end(), -1) > 1) return std::nullopt;
      return result("torch.ops.aten.reshape.default", {{"self", TensorArg{part}, 1}, {"shape", sizes, 1}});
    }
    return std::nullopt;
  }

  // wrap_with_set_grad_enabled(enabled, graph, operands...): the graph's nodes in its place.
  void inline_region(const Node& node) {
    const graph::RawArg* raw = nullptr;
    std::vector<std::string> operands;
    for (const NamedArgument& a : node.inputs) {
      if (const auto* r = std::get_if<graph::RawArg>(&a.value)) {
        raw = r;
      } else if (const auto* t = std::get_if<TensorArg>(&a.value)) {
        operands.push_back(t->name);
      } else if (!std::holds_alternative<bool>(a.value)) {
        raw = nullptr;
        break;
      }
    }
    if (raw == nullptr || !raw->json.contains("as_graph")) {
      fail("node '{}' ({}) holds a region that is not understood: {}", node.name, node.target, kRemedy);
    }
    Graph region = graph::parse_graph(raw->json.at("as_graph").at("graph"), program_);
    const auto results = graph::output_names(node);
    std::map<std::string, std::string> names;  // of the region -> here
    for (std::size_t i = 0; i < region.inputs.size(); ++i) {
      const auto* t = std::get_if<TensorArg>(&region.inputs[i]);
      if (t == nullptr || i >= operands.size()) {
        fail("node '{}' ({}) takes other values than tensors: {}", node.name, node.target, kRemedy);
      }
      names[t->name] = operands[i];
    }
    std::vector<std::string> returned;
    for (const Argument& a : region.outputs) {
      for (std::string& n : graph::value_names(a)) returned.push_back(std::move(n));
    }
    if (returned.size() != results.size()) {
      fail("node '{}' ({}) returns other values than tensors: {}", node.name, node.target, kRemedy);
    }
    for (const Node& inner : region.nodes) {
      for (const std::string& n : graph::output_names(inner)) {
        const auto at = std::find(returned.begin(), returned.end(), n);
        const bool result = at != returned.end();
        const std::string here = result ? results[static_cast<std::size_t>(at - returned.begin())] : names_.fresh(n);
        names[n] = here;
        if (const auto meta = region.tensors.find(n); meta != region.tensors.end() && !result) {
          graph_.tensors.emplace(here, meta->second);
        }
        if (const auto sym = region.sym_ints.find(n); sym != region.sym_ints.end()) {
          graph_.sym_ints.emplace(here, sym->second);
        }
      }
      Node moved = inner;
      for (NamedArgument& a : moved.inputs) map_names(a.value, names);
      for (Argument& a : moved.outputs) map_names(a, names);
      const auto made = graph::output_names(moved);
      moved.name = made.size() == 1 ? made[0] : names_.fresh(moved.name);
      visit(std::move(moved));
    }
    for (std::size_t i = 0; i < returned.size(); ++i) {  // an operand that is handed through
      if (names.at(returned[i]) != results[i]) alias(results[i], names.at(returned[i]));
    }
  }

  static void map_names(Argument& argument, const std::map<std::string, std::string>& names) {
    const auto map = [&](std::string& name) {
      if (const auto it = names.find(name); it != names.end()) name = it->second;
    };
    if (auto* t = std::get_if<TensorArg>(&argument)) map(t->name);
    if (auto* list = std::get_if<graph::TensorListArg>(&argument)) {
      for (std::string& n : list->names) map(n);
    }
    if (auto* list = std::get_if<graph::OptionalTensorListArg>(&argument)) {
      for (auto& n : list->names) {
        if (n) map(*n);
      }
    }
    const auto integer = [&](graph::SymInt& s) {
      if (auto* n = std::get_if<std::string>(&s.value)) map(*n);
    };
    if (auto* s = std::get_if<graph::SymInt>(&argument)) integer(*s);
    if (auto* list = std::get_if<graph::SymIntListArg>(&argument)) {
      for (graph::SymInt& s : list->values) integer(s);
    }
  }

  Program program_;
  Graph& graph_;
  FreshNames names_;
  std::set<std::string> inputs_;
  std::map<std::string, View> views_;
  std::map<std::string, Memory> memory_;                    // by root
  std::map<std::string, int> born_;                         // the memory's version that a value was made from
  std::map<std::string, std::pair<int, std::string>> now_;  // version, and the value that shows it
};

}  // namespace

bool needs_functional(const Program& program) {
  return std::any_of(program.graph.nodes.begin(), program.graph.nodes.end(),
                     [](const Node& node) { return is_in_place(node.target) || node.target == kGradMode; });
}

void forget_templates(Graph& graph) {
  static const std::map<std::string, std::string> kMakers{
      {"new_zeros", "zeros"}, {"new_ones", "ones"}, {"new_full", "full"}};
  for (Node& node : graph.nodes) {
    const auto maker = kMakers.find(aten_name(node.target));
    const auto results = graph::output_names(node);
    if (maker == kMakers.end() || results.size() != 1 || node.find("size") == nullptr) continue;
    const TensorMeta& meta = graph.tensors.at(results[0]);
    std::vector<NamedArgument> inputs{{"size", *node.find("size"), 1}};
    if (maker->second == "full") {
      if (node.find("fill_value") == nullptr) continue;
      inputs.push_back({"fill_value", *node.find("fill_value"), 1});
    }
    inputs.push_back({"dtype", graph::DTypeArg{meta.dtype}, 2});
    inputs.push_back({"device", meta.device, 2});
    inputs.push_back({"pin_memory", false, 2});
    node.target = fmt::format("torch.ops.aten.{}.default", maker->second);
    node.inputs = std::move(inputs);
  }
}

Program functional(const Program& program) {
  return Functional(program).run();
}

}  // namespace ikbo::transform
