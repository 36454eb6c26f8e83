// models/model.json -> Program. The format is torch/_export/serde/schema.py of PyTorch 2.11, schema version 8.
#include <limits>
#include <utility>

#include "graph/error.h"
#include "graph/program.h"

namespace ikbo::graph {
namespace {

constexpr int kSchemaMajor = 8;

// Every access names the place, so that a damaged archive gives a message and not an exception of the JSON library.
const Json& member(const Json& json, const char* key, const char* where) {
  if (!json.is_object()) fail("model.json: {} is no object", where);
  const auto it = json.find(key);
  if (it == json.end()) fail("model.json: {} has no '{}'", where, key);
  return *it;
}
const Json& array(const Json& json, const char* where) {
  if (!json.is_array()) fail("model.json: {} is no list", where);
  return json;
}
std::string text(const Json& json, const char* where) {
  if (!json.is_string()) fail("model.json: {} is no string", where);
  return json.get<std::string>();
}
std::int64_t integer(const Json& json, const char* where) {
  if (!json.is_number_integer() || (json.is_number_unsigned() && json.get<std::uint64_t>() > INT64_MAX)) {
    fail("model.json: {} is no 64-bit integer", where);
  }
  return json.get<std::int64_t>();
}
int small_integer(const Json& json, const char* where) {
  const std::int64_t value = integer(json, where);
  if (value < -1 || value > 1'000'000) fail("model.json: {} is out of range: {}", where, value);
  return static_cast<int>(value);
}
bool boolean(const Json& json, const char* where) {
  if (!json.is_boolean()) fail("model.json: {} is neither true nor false", where);
  return json.get<bool>();
}
double number(const Json& json, const char* where) {
  if (json.is_string()) {  // "Infinity", "-Infinity", "NaN"
    const std::string s = json.get<std::string>();
    if (s == "Infinity" || s == "inf") return std::numeric_limits<double>::infinity();
    if (s == "-Infinity" || s == "-inf") return -std::numeric_limits<double>::infinity();
    if (s == "NaN" || s == "nan") return std::numeric_limits<double>::quiet_NaN();
  }
  if (!json.is_number()) fail("model.json: {} is no number", where);
  return json.get<double>();
}

struct Reader {
  Program& program;

  Expr sym_int(const Json& json, const char* where) {
    if (json.is_object() && json.contains("as_int")) return integer(json["as_int"], where);
    const Json& expression = member(json, "as_expr", where);
    const Expr e = Expr::parse(text(member(expression, "expr_str", where), where));
    const auto hint = expression.find("hint");
    if (hint != expression.end() && hint->is_object() && hint->contains("as_int")) {
      const auto symbols = e.symbols();
      if (symbols.size() == 1 && e == Expr::symbol(*symbols.begin())) {
        program.hints.emplace(*symbols.begin(), integer((*hint)["as_int"], where));
      }
    }
    return e;
  }

  Device device(const Json& json) {
    Device d;
    d.type = text(member(json, "type", "a device"), "a device's type");
    const auto index = json.find("index");
    if (index != json.end() && !index->is_null()) d.index = small_integer(*index, "a device's index");
    return d;
  }

  TensorMeta tensor_meta(const Json& json) {
    TensorMeta meta;
    meta.dtype = static_cast<DType>(small_integer(member(json, "dtype", "a tensor"), "a tensor's dtype"));
    for (const Json& s : array(member(json, "sizes", "a tensor"), "a tensor's sizes")) {
      meta.sizes.push_back(sym_int(s, "a tensor's size"));
    }
    for (const Json& s : array(member(json, "strides", "a tensor"), "a tensor's strides")) {
      meta.strides.push_back(sym_int(s, "a tensor's stride"));
    }
    meta.storage_offset = sym_int(member(json, "storage_offset", "a tensor"), "a tensor's storage offset");
    meta.device = device(member(json, "device", "a tensor"));
    meta.layout = small_integer(member(json, "layout", "a tensor"), "a tensor's layout");
    meta.requires_grad = boolean(member(json, "requires_grad", "a tensor"), "a tensor's requires_grad");
    return meta;
  }

  std::string tensor_name(const Json& json) {
    return text(member(json, "name", "a tensor argument"), "a tensor's name");
  }

  SymInt sym_int_argument(const Json& json) {
    if (json.is_object() && json.contains("as_int")) return {integer(json["as_int"], "an integer argument")};
    return {text(member(json, "as_name", "a symbolic integer"), "a symbolic integer's name")};
  }

  Argument argument(const Json& json) {
    if (!json.is_object() || json.size() != 1) fail("model.json: an argument is no object with one member");
    const auto entry = json.begin();
    const std::string& kind = entry.key();
    const Json& value = entry.value();
    if (kind == "as_none") return NoneArg{};
    if (kind == "as_tensor") return TensorArg{tensor_name(value)};
    if (kind == "as_tensors") {
      TensorListArg list;
      for (const Json& t : array(value, "a tensor list")) list.names.push_back(tensor_name(t));
      return list;
    }
    if (kind == "as_optional_tensors") {
      OptionalTensorListArg list;
      for (const Json& t : array(value, "an optional tensor list")) {
        if (t.is_object() && t.contains("as_tensor")) {
          list.names.emplace_back(tensor_name(t["as_tensor"]));
        } else {
          list.names.emplace_back(std::nullopt);
        }
      }
      return list;
    }
    if (kind == "as_optional_tensor") {
      if (value.is_object() && value.contains("as_tensor")) return TensorArg{tensor_name(value["as_tensor"])};
      return NoneArg{};
    }
    if (kind == "as_int") return integer(value, "an integer argument");
    if (kind == "as_ints") {
      std::vector<std::int64_t> list;
      for (const Json& i : array(value, "an integer list")) list.push_back(integer(i, "an integer argument"));
      return list;
    }
    if (kind == "as_float") return number(value, "a float argument");
    if (kind == "as_floats") {
      std::vector<double> list;
      for (const Json& i : array(value, "a float list")) list.push_back(number(i, "a float argument"));
      return list;
    }
    if (kind == "as_bool") return boolean(value, "a bool argument");
    if (kind == "as_bools") {
      std::vector<bool> list;
      for (const Json& i : array(value, "a bool list")) list.push_back(boolean(i, "a bool argument"));
      return list;
    }
    if (kind == "as_string") return text(value, "a string argument");
    if (kind == "as_strings") {
      std::vector<std::string> list;
      for (const Json& i : array(value, "a string list")) list.push_back(text(i, "a string argument"));
      return list;
    }
    if (kind == "as_sym_int") return sym_int_argument(value);
    if (kind == "as_sym_ints") {
      SymIntListArg list;
      for (const Json& i : array(value, "a size list")) list.values.push_back(sym_int_argument(i));
      return list;
    }
    if (kind == "as_sym_float") {
      if (value.is_object() && value.contains("as_float")) return SymFloatArg{number(value["as_float"], "a float")};
      return SymFloatArg{text(member(value, "as_name", "a symbolic float"), "a symbolic float's name")};
    }
    if (kind == "as_sym_bool") {
      if (value.is_object() && value.contains("as_bool")) return SymBoolArg{boolean(value["as_bool"], "a bool")};
      return SymBoolArg{text(member(value, "as_name", "a symbolic bool"), "a symbolic bool's name")};
    }
    if (kind == "as_scalar_type") return DTypeArg{static_cast<DType>(small_integer(value, "a dtype"))};
    if (kind == "as_memory_format") return MemoryFormatArg{small_integer(value, "a memory format")};
    if (kind == "as_layout") return LayoutArg{small_integer(value, "a layout")};
    if (kind == "as_device") return device(value);
    return RawArg{json};
  }

  Node node(const Json& json) {
    Node n;
    for (const auto& [key, value] : json.items()) {
      if (key == "target") {
        n.target = text(value, "a node's target");
      } else if (key == "inputs") {
        for (const Json& i : array(value, "a node's inputs")) {
          NamedArgument a;
          a.name = text(member(i, "name", "a node's input"), "an argument's name");
          a.value = argument(member(i, "arg", "a node's input"));
          const auto kind = i.find("kind");
          if (kind != i.end() && !kind->is_null()) a.kind = small_integer(*kind, "an argument's kind");
          n.inputs.push_back(std::move(a));
        }
      } else if (key == "outputs") {
        for (const Json& o : array(value, "a node's outputs")) n.outputs.push_back(argument(o));
      } else if (key == "name") {
        if (!value.is_null()) n.name = text(value, "a node's name");
      } else if (key == "metadata") {
        n.metadata = value;
      } else {
        n.extra[key] = value;
      }
    }
    if (n.target.empty()) fail("model.json: a node has no target");
    if (n.name.empty()) {
      const auto names = output_names(n);
      n.name = names.empty() ? n.target : names.front();
    }
    return n;
  }

  void graph(const Json& json) {
    Graph& g = program.graph;
    for (const Json& i : array(member(json, "inputs", "the graph"), "the graph's inputs"))
      g.inputs.push_back(argument(i));
    for (const Json& i : array(member(json, "outputs", "the graph"), "the graph's outputs")) {
      g.outputs.push_back(argument(i));
    }
    // Values first: hints of plain symbols come with them.
    for (const auto& [name, meta] : member(json, "tensor_values", "the graph").items()) {
      g.tensors.emplace(name, tensor_meta(meta));
    }
    for (const auto& [name, value] : member(json, "sym_int_values", "the graph").items()) {
      g.sym_ints.emplace(name, sym_int(value, "a symbolic integer"));
    }
    g.sym_bools = member(json, "sym_bool_values", "the graph");
    if (json.contains("sym_float_values")) g.sym_floats = json["sym_float_values"];
    if (json.contains("custom_obj_values")) g.custom_objects = json["custom_obj_values"];
    if (json.contains("is_single_tensor_return")) {
      g.single_tensor_return = boolean(json["is_single_tensor_return"], "is_single_tensor_return");
    }
    for (const Json& n : array(member(json, "nodes", "the graph"), "the graph's nodes")) g.nodes.push_back(node(n));
  }

  InputSpec input_spec(const Json& json) {
    if (!json.is_object() || json.size() != 1)
      fail("model.json: an input of the signature is no object with one member");
    const auto entry = json.begin();
    const std::string& kind = entry.key();
    const Json& value = entry.value();
    InputSpec spec;
    spec.json = json;
    if (kind == "user_input") {
      spec.kind = InputKind::kUserInput;
      spec.value = argument(member(value, "arg", "an input"));
    } else if (kind == "parameter" || kind == "buffer" || kind == "tensor_constant") {
      spec.kind = kind == "parameter" ? InputKind::kParameter
                  : kind == "buffer"  ? InputKind::kBuffer
                                      : InputKind::kTensorConstant;
      spec.value = TensorArg{tensor_name(member(value, "arg", "an input"))};
      spec.target = text(member(value, (kind + "_name").c_str(), "an input"), "an input's target");
      if (kind == "buffer") spec.persistent = boolean(member(value, "persistent", "a buffer"), "persistent");
    } else if (kind == "constant_input") {
      spec.kind = InputKind::kConstantInput;
      spec.target = text(member(value, "name", "a constant input"), "a constant input's name");
    } else if (kind == "custom_obj") {
      spec.kind = InputKind::kCustomObject;
    } else if (kind == "token") {
      spec.kind = InputKind::kToken;
    } else {
      fail("model.json: an input of an unknown kind '{}'", kind);
    }
    return spec;
  }

  // Every value that is read must have been made before, exactly once: the graph is in order.
  void check_names() {
    std::map<std::string, bool> made;
    const Graph& g = program.graph;
    const auto define = [&](const std::string& name, const char* what) {
      if (!made.emplace(name, true).second) fail("model.json: value '{}' is made twice (by {})", name, what);
    };
    for (const Argument& a : g.inputs) {
      for (const std::string& name : value_names(a)) define(name, "an input");
      if (const auto* t = std::get_if<TensorArg>(&a); t != nullptr && !g.tensors.contains(t->name)) {
        fail("model.json: input '{}' has no entry in tensor_values", t->name);
      }
    }
    for (const Node& n : g.nodes) {
      for (const std::string& name : input_names(n)) {
        if (!made.contains(name)) fail("model.json: node '{}' reads '{}', which nothing before it makes", n.name, name);
      }
      for (const std::string& name : output_names(n)) define(name, n.name.c_str());
    }
    for (const Argument& a : g.outputs) {
      for (const std::string& name : value_names(a)) {
        if (!made.contains(name)) fail("model.json: output '{}' is made by no node", name);
      }
    }
    for (const InputSpec& spec : program.input_specs) {
      for (const std::string& name : value_names(spec.value)) {
        if (!made.contains(name)) fail("model.json: the signature names '{}', which the graph does not have", name);
      }
    }
  }

  void read(const Json& model) {
    const Json& version = member(model, "schema_version", "the model");
    const std::int64_t major = integer(member(version, "major", "schema_version"), "schema_version.major");
    if (major != kSchemaMajor) {
      fail("model.json has schema version {}, but this program reads version {} (PyTorch 2.11)", major, kSchemaMajor);
    }
    const Json& module = member(model, "graph_module", "the model");
    graph(member(module, "graph", "graph_module"));
    const Json& signature = member(module, "signature", "graph_module");
    for (const Json& i : array(member(signature, "input_specs", "the signature"), "input_specs")) {
      program.input_specs.push_back(input_spec(i));
    }
    for (const Json& o : array(member(signature, "output_specs", "the signature"), "output_specs")) {
      if (!o.is_object() || o.size() != 1) fail("model.json: an output of the signature is no object with one member");
      OutputSpec spec;
      spec.json = o;
      spec.user_output = o.begin().key() == "user_output";
      if (spec.user_output) spec.value = argument(member(o.begin().value(), "arg", "an output"));
      program.output_specs.push_back(std::move(spec));
    }
    if (program.output_specs.size() != program.graph.outputs.size())
      fail("model.json: signature and graph disagree on outputs");
    if (program.input_specs.size() != program.graph.inputs.size())
      fail("model.json: signature and graph disagree on inputs");
    program.module_call_graph = array(member(module, "module_call_graph", "graph_module"), "module_call_graph");
    for (const auto& [name, range] : member(model, "range_constraints", "the model").items()) {
      Range r;
      if (range.is_object() && range.contains("min_val") && !range["min_val"].is_null()) {
        r.min = integer(range["min_val"], "a range");
      }
      if (range.is_object() && range.contains("max_val") && !range["max_val"].is_null()) {
        r.max = integer(range["max_val"], "a range");
      }
      program.ranges.emplace(name, r);
    }
    if (model.contains("guards_code")) {
      for (const Json& g : array(model["guards_code"], "guards_code")) program.guards.push_back(text(g, "a guard"));
    }
    program.rest = model;
    program.rest["graph_module"].erase("graph");
    program.rest["graph_module"].erase("signature");
    program.rest["graph_module"].erase("module_call_graph");
    program.rest.erase("range_constraints");
    program.rest.erase("guards_code");
    check_names();
  }
};

}  // namespace

Graph parse_graph(const Json& graph, const Program& program) {
  Program inner;
  inner.hints = program.hints;
  Reader{inner}.graph(graph);
  return std::move(inner.graph);
}

Program parse_program(const Json& model) {
  Program program;
  Reader{program}.read(model);
  return program;
}

}  // namespace ikbo::graph
