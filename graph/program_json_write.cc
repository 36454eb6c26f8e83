// Program -> models/model.json; program_json.cc reads it.
#include <cmath>
#include <utility>

#include "graph/program.h"

namespace ikbo::graph {
namespace {

struct Writer {
  const Program& program;

  Json sym_int(const Expr& e) {
    if (const auto value = e.as_integer()) return {{"as_int", *value}};
    Json expression = {{"expr_str", e.srepr()}, {"hint", nullptr}};
    if (const auto hint = e.evaluate(program.hints)) expression["hint"] = Json{{"as_int", *hint}};
    return {{"as_expr", expression}};
  }
  static Json device(const Device& d) {
    return {{"type", d.type}, {"index", d.index ? Json(*d.index) : Json(nullptr)}};
  }
  Json tensor_meta(const TensorMeta& m) {
    Json sizes = Json::array();
    Json strides = Json::array();
    for (const Expr& e : m.sizes) sizes.push_back(sym_int(e));
    for (const Expr& e : m.strides) strides.push_back(sym_int(e));
    return {{"dtype", static_cast<int>(m.dtype)},
            {"sizes", sizes},
            {"requires_grad", m.requires_grad},
            {"device", device(m.device)},
            {"strides", strides},
            {"storage_offset", sym_int(m.storage_offset)},
            {"layout", m.layout}};
  }
  static Json tensor(const std::string& name) { return {{"name", name}}; }
  static Json sym_int_argument(const SymInt& s) {
    if (const auto* name = s.name()) return {{"as_name", *name}};
    return {{"as_int", std::get<std::int64_t>(s.value)}};
  }
  static Json number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return value;
  }

  Json operator()(const NoneArg&) { return {{"as_none", true}}; }
  Json operator()(const TensorArg& a) { return {{"as_tensor", tensor(a.name)}}; }
  Json operator()(const TensorListArg& a) {
    Json list = Json::array();
    for (const std::string& n : a.names) list.push_back(tensor(n));
    return {{"as_tensors", list}};
  }
  Json operator()(const OptionalTensorListArg& a) {
    Json list = Json::array();
    for (const auto& n : a.names) list.push_back(n ? Json{{"as_tensor", tensor(*n)}} : Json{{"as_none", true}});
    return {{"as_optional_tensors", list}};
  }
  Json operator()(const SymInt& a) { return {{"as_sym_int", sym_int_argument(a)}}; }
  Json operator()(const SymIntListArg& a) {
    Json list = Json::array();
    for (const SymInt& s : a.values) list.push_back(sym_int_argument(s));
    return {{"as_sym_ints", list}};
  }
  Json operator()(const SymFloatArg& a) {
    if (const auto* name = std::get_if<std::string>(&a.value)) return {{"as_sym_float", {{"as_name", *name}}}};
    return {{"as_sym_float", {{"as_float", number(std::get<double>(a.value))}}}};
  }
  Json operator()(const SymBoolArg& a) {
    if (const auto* name = std::get_if<std::string>(&a.value)) return {{"as_sym_bool", {{"as_name", *name}}}};
    return {{"as_sym_bool", {{"as_bool", std::get<bool>(a.value)}}}};
  }
  Json operator()(bool a) { return {{"as_bool", a}}; }
  Json operator()(const std::vector<bool>& a) { return {{"as_bools", a}}; }
  Json operator()(std::int64_t a) { return {{"as_int", a}}; }
  Json operator()(const std::vector<std::int64_t>& a) { return {{"as_ints", a}}; }
  Json operator()(double a) { return {{"as_float", number(a)}}; }
  Json operator()(const std::vector<double>& a) {
    Json list = Json::array();
    for (const double d : a) list.push_back(number(d));
    return {{"as_floats", list}};
  }
  Json operator()(const std::string& a) { return {{"as_string", a}}; }
  Json operator()(const std::vector<std::string>& a) { return {{"as_strings", a}}; }
  Json operator()(const DTypeArg& a) { return {{"as_scalar_type", static_cast<int>(a.dtype)}}; }
  Json operator()(const MemoryFormatArg& a) { return {{"as_memory_format", a.code}}; }
  Json operator()(const LayoutArg& a) { return {{"as_layout", a.code}}; }
  Json operator()(const Device& a) { return {{"as_device", device(a)}}; }
  Json operator()(const RawArg& a) { return a.json; }

  Json argument(const Argument& a) { return std::visit(*this, a); }

  Json node(const Node& n) {
    Json inputs = Json::array();
    for (const NamedArgument& a : n.inputs) {
      inputs.push_back({{"name", a.name}, {"arg", argument(a.value)}, {"kind", a.kind}});
    }
    Json outputs = Json::array();
    for (const Argument& a : n.outputs) outputs.push_back(argument(a));
    Json json = {{"target", n.target}, {"inputs", inputs}, {"outputs", outputs}, {"metadata", n.metadata}};
    json["is_hop_single_tensor_return"] = nullptr;
    for (const auto& [key, value] : n.extra.items()) json[key] = value;
    json["name"] = n.name;
    return json;
  }

  Json input_spec(const InputSpec& s) {
    const auto arg = [&] { return tensor(std::get<TensorArg>(s.value).name); };
    switch (s.kind) {
      case InputKind::kUserInput:
        return {{"user_input", {{"arg", argument(s.value)}}}};
      case InputKind::kParameter:
        return {{"parameter", {{"arg", arg()}, {"parameter_name", s.target}}}};
      case InputKind::kBuffer:
        return {{"buffer", {{"arg", arg()}, {"buffer_name", s.target}, {"persistent", s.persistent}}}};
      case InputKind::kTensorConstant:
        return {{"tensor_constant", {{"arg", arg()}, {"tensor_constant_name", s.target}}}};
      default:
        return s.json;
    }
  }

  Json write() {
    const Graph& g = program.graph;
    Json graph;
    graph["inputs"] = Json::array();
    for (const Argument& a : g.inputs) graph["inputs"].push_back(argument(a));
    graph["outputs"] = Json::array();
    for (const Argument& a : g.outputs) graph["outputs"].push_back(argument(a));
    graph["nodes"] = Json::array();
    for (const Node& n : g.nodes) graph["nodes"].push_back(node(n));
    graph["tensor_values"] = Json::object();
    for (const auto& [name, meta] : g.tensors) graph["tensor_values"][name] = tensor_meta(meta);
    graph["sym_int_values"] = Json::object();
    for (const auto& [name, value] : g.sym_ints) graph["sym_int_values"][name] = sym_int(value);
    graph["sym_bool_values"] = g.sym_bools;
    graph["is_single_tensor_return"] = g.single_tensor_return;
    graph["custom_obj_values"] = g.custom_objects;
    graph["sym_float_values"] = g.sym_floats;

    Json signature = {{"input_specs", Json::array()}, {"output_specs", Json::array()}};
    for (const InputSpec& s : program.input_specs) signature["input_specs"].push_back(input_spec(s));
    for (const OutputSpec& s : program.output_specs) {
      signature["output_specs"].push_back(s.user_output ? Json{{"user_output", {{"arg", argument(s.value)}}}} : s.json);
    }

    Json model = program.rest;
    model["graph_module"]["graph"] = std::move(graph);
    model["graph_module"]["signature"] = std::move(signature);
    model["graph_module"]["module_call_graph"] = program.module_call_graph;
    model["range_constraints"] = Json::object();
    for (const auto& [name, range] : program.ranges) {
      model["range_constraints"][name] = {{"min_val", range.min ? Json(*range.min) : Json(nullptr)},
                                          {"max_val", range.max ? Json(*range.max) : Json(nullptr)}};
    }
    model["guards_code"] = program.guards;
    return model;
  }
};

}  // namespace

Json emit_program(const Program& program) {
  return Writer{program}.write();
}

}  // namespace ikbo::graph
