#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "graph/expr.h"

namespace ikbo::graph {

using Json = nlohmann::ordered_json;

/// Codes that torch.export writes for element types (torch/_export/serde/schema.py).
enum class DType : int {
  kUInt8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kComplex32 = 9,
  kComplex64 = 10,
  kComplex128 = 11,
  kBool = 12,
  kBFloat16 = 13,
  kUInt16 = 28,
  kFloat8E4M3 = 29,
  kFloat8E5M2 = 30,
};
/// "float32", "int64", ...; "dtype 99" for a code that is not known.
std::string dtype_name(DType dtype);
bool is_floating(DType dtype);
bool is_integral(DType dtype);  // without bool
/// Bytes of one element; 0 for a code that is not known.
std::int64_t dtype_bytes(DType dtype);

struct Device {
  std::string type = "cpu";
  std::optional<int> index;
  bool operator==(const Device&) const = default;
};

/// What the archive says of a tensor value.
struct TensorMeta {
  DType dtype = DType::kFloat32;
  std::vector<Expr> sizes;
  std::vector<Expr> strides;
  Expr storage_offset;
  Device device;
  int layout = 7;  // strided
  bool requires_grad = false;
};
/// "float32 [s51, 50]"
std::string describe(const TensorMeta& meta);
/// Row-major strides of `sizes`.
std::vector<Expr> contiguous_strides(const std::vector<Expr>& sizes);

// ---- Arguments of a node ------------------------------------------------------------------------------------------
struct NoneArg {
  bool operator==(const NoneArg&) const = default;
};
struct TensorArg {
  std::string name;
  bool operator==(const TensorArg&) const = default;
};
struct TensorListArg {
  std::vector<std::string> names;
  bool operator==(const TensorListArg&) const = default;
};
struct OptionalTensorListArg {
  std::vector<std::optional<std::string>> names;
  bool operator==(const OptionalTensorListArg&) const = default;
};
/// An integer, or the name of a symbolic integer value of the graph.
struct SymInt {
  std::variant<std::int64_t, std::string> value;
  bool operator==(const SymInt&) const = default;
  const std::string* name() const { return std::get_if<std::string>(&value); }
};
struct SymIntListArg {
  std::vector<SymInt> values;
  bool operator==(const SymIntListArg&) const = default;
};
struct SymFloatArg {
  std::variant<double, std::string> value;
  bool operator==(const SymFloatArg&) const = default;
};
struct SymBoolArg {
  std::variant<bool, std::string> value;
  bool operator==(const SymBoolArg&) const = default;
};
struct DTypeArg {
  DType dtype;
  bool operator==(const DTypeArg&) const = default;
};
struct MemoryFormatArg {
  int code;
  bool operator==(const MemoryFormatArg&) const = default;
};
struct LayoutArg {
  int code;
  bool operator==(const LayoutArg&) const = default;
};
/// Kinds that nothing here looks into (sub-graphs, custom objects, complex numbers, ...), kept as they stand.
struct RawArg {
  Json json;
  bool operator==(const RawArg& o) const { return json == o.json; }
};

using Argument = std::variant<NoneArg, TensorArg, TensorListArg, OptionalTensorListArg, SymInt, SymIntListArg,
                              SymFloatArg, SymBoolArg, bool, std::vector<bool>, std::int64_t, std::vector<std::int64_t>,
                              double, std::vector<double>, std::string, std::vector<std::string>, DTypeArg,
                              MemoryFormatArg, LayoutArg, Device, RawArg>;

struct NamedArgument {
  std::string name;
  Argument value;
  int kind = 1;  // 1 positional, 2 keyword, as the archive has it
};

/// One operator call. Outputs are TensorArg, TensorListArg, SymInt (by name), SymFloatArg, SymBoolArg or NoneArg.
struct Node {
  std::string target;  // "torch.ops.aten.linear.default", "_operator.mul", ...
  std::vector<NamedArgument> inputs;
  std::vector<Argument> outputs;
  std::string name;
  Json metadata = Json::object();
  Json extra = Json::object();  // fields of later schema versions and of higher-order operators

  const Argument* find(const std::string& argument) const;
};

/// Names of the values (tensors and symbolic scalars) that an argument or a node reads or makes, in order.
std::vector<std::string> value_names(const Argument& argument);
std::vector<std::string> input_names(const Node& node);
std::vector<std::string> output_names(const Node& node);

struct Graph {
  std::vector<Argument> inputs;
  std::vector<Argument> outputs;
  std::vector<Node> nodes;
  std::map<std::string, TensorMeta> tensors;
  std::map<std::string, Expr> sym_ints;
  Json sym_bools = Json::object();
  Json sym_floats = Json::object();
  Json custom_objects = Json::object();
  bool single_tensor_return = false;
};

// ---- Signature ----------------------------------------------------------------------------------------------------
enum class InputKind { kParameter, kBuffer, kTensorConstant, kUserInput, kConstantInput, kCustomObject, kToken };

struct InputSpec {
  InputKind kind = InputKind::kUserInput;
  Argument value;          // what the graph calls it
  std::string target;      // parameter, buffer or constant: its name in the state dict or constant table
  bool persistent = true;  // buffer
  Json json;               // as read, for kinds that nothing here makes
};

struct OutputSpec {
  bool user_output = true;  // false: a mutation, loss or gradient of a training graph
  Argument value;
  Json json;
};

struct Range {
  std::optional<std::int64_t> min;
  std::optional<std::int64_t> max;
};

/// A whole exported program, without its tensors' contents.
struct Program {
  Graph graph;
  std::vector<InputSpec> input_specs;
  std::vector<OutputSpec> output_specs;
  std::map<std::string, std::int64_t> hints;  // symbol -> its value in the example that was exported
  std::map<std::string, Range> ranges;        // symbol -> range
  std::vector<std::string> guards;            // Python expressions that module() checks
  Json module_call_graph = Json::array();
  Json rest = Json::object();  // every other member of model.json, kept as read
};

/// Reads and writes `models/model.json`. Throws ikbo::Error with what is wrong and where.
Program parse_program(const Json& model);
Json emit_program(const Program& program);
/// A graph inside an argument ("as_graph"), whose symbols are those of `program`.
Graph parse_graph(const Json& graph, const Program& program);

/// One tensor that the caller passes: the name in the graph, and the name the model's author knows it by.
struct UserInput {
  std::string value;  // "x_user_id"
  std::string name;   // "user_id": last key of its path; the parameter's name for a plain argument
  std::string path;   // "x['user_id']": full path, unique
  std::vector<std::variant<std::int64_t, std::string>> keys;  // path below args (index) or kwargs (key)
  bool keyword = false;                                       // passed by keyword
};
/// The tensors a caller passes, in the graph's order, named through `in_spec` and `forward_arg_names`.
std::vector<UserInput> user_inputs(const Program& program);
/// Appends one tensor to the call: signature, in_spec and forward_arg_names follow. It goes last among the positional
/// arguments, or among the keyword arguments where the call has some. `value` must be in graph.tensors already.
void append_user_input(Program& program, const std::string& value);

}  // namespace ikbo::graph
