#pragma once

#include <caffe2/serialize/inline_container.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "graph/program.h"

namespace ikbo::graph::testing {

/// The smallest program that is one: y = x @ w.T with w [2, 3], x [s0, 3] and nothing else, as torch.export writes it.
inline Json small_model() {
  return Json::parse(R"json({
  "graph_module": {
    "graph": {
      "inputs": [{"as_tensor": {"name": "p_w"}}, {"as_tensor": {"name": "x"}}],
      "outputs": [{"as_tensor": {"name": "y"}}],
      "nodes": [{"target": "torch.ops.aten.linear.default",
                 "inputs": [{"name": "input", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
                            {"name": "weight", "arg": {"as_tensor": {"name": "p_w"}}, "kind": 1}],
                 "outputs": [{"as_tensor": {"name": "y"}}], "metadata": {}, "is_hop_single_tensor_return": null,
                 "name": "y"}],
      "tensor_values": {
        "p_w": {"dtype": 7, "sizes": [{"as_int": 2}, {"as_int": 3}], "requires_grad": true,
                "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 3}, {"as_int": 1}],
                "storage_offset": {"as_int": 0}, "layout": 7},
        "x": {"dtype": 7, "sizes": [{"as_expr": {"expr_str": "Symbol('s0', positive=True, integer=True)",
                                                 "hint": {"as_int": 4}}}, {"as_int": 3}],
              "requires_grad": false, "device": {"type": "cpu", "index": null},
              "strides": [{"as_int": 3}, {"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7},
        "y": {"dtype": 7, "sizes": [{"as_expr": {"expr_str": "Symbol('s0', positive=True, integer=True)",
                                                 "hint": {"as_int": 4}}}, {"as_int": 2}],
              "requires_grad": true, "device": {"type": "cpu", "index": null},
              "strides": [{"as_int": 2}, {"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}},
      "sym_int_values": {}, "sym_bool_values": {}, "is_single_tensor_return": false, "custom_obj_values": {},
      "sym_float_values": {}},
    "signature": {
      "input_specs": [{"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}},
                      {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}],
      "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": "y"}}}}]},
    "module_call_graph": [{"fqn": "", "signature": {
      "inputs": [], "outputs": [],
      "in_spec": "[1, {\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": [{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": [{\"type\": null, \"context\": null, \"children_spec\": []}]}, {\"type\": \"builtins.dict\", \"context\": \"[]\", \"children_spec\": []}]}]",
      "out_spec": "[1, {\"type\": null, \"context\": null, \"children_spec\": []}]",
      "forward_arg_names": ["x"]}}],
    "metadata": {}, "treespec_namedtuple_fields": {}},
  "opset_version": {"aten": 10}, "range_constraints": {"s0": {"min_val": 0, "max_val": null}},
  "schema_version": {"major": 8, "minor": 17}, "verifiers": ["ATEN"], "torch_version": "2.11.0", "guards_code": []
})json");
}

inline Json small_weight(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, std::int64_t offset = 0,
                         const std::string& file = "weight_0") {
  Json s = Json::array();
  Json t = Json::array();
  for (const auto v : sizes) s.push_back({{"as_int", v}});
  for (const auto v : strides) t.push_back({{"as_int", v}});
  return {{"path_name", file},
          {"is_param", true},
          {"use_pickle", false},
          {"tensor_meta",
           {{"dtype", 7},
            {"sizes", s},
            {"requires_grad", true},
            {"device", {{"type", "cpu"}, {"index", nullptr}}},
            {"strides", t},
            {"storage_offset", {{"as_int", offset}}},
            {"layout", 7}}}};
}

using Members = std::map<std::string, std::string>;

inline Members small_members() {
  const float w[6] = {1, 2, 3, 4, 5, 6};
  return {{"archive_format", "pt2"},
          {"archive_version", "0"},
          {"models/model.json", small_model().dump()},
          {"data/weights/model_weights_config.json", Json{{"config", {{"w", small_weight({2, 3}, {3, 1})}}}}.dump()},
          {"data/weights/weight_0", std::string(reinterpret_cast<const char*>(w), sizeof(w))},
          {"data/constants/model_constants_config.json", R"({"config": {}})"},
          {"data/sample_inputs/model.pt", ""}};
}

/// The archive's bytes, written by PyTorch's own writer.
inline std::string zip(const Members& members) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  writer.setMinVersion(6);
  for (const auto& [name, contents] : members) writer.writeRecord(name, contents.data(), contents.size());
  writer.writeEndOfFile();
  return bytes;
}

/// A folder that goes with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ikbo-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path file(const std::string& name, const std::string& contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace ikbo::graph::testing
