// What the Python tests drive: reads an archive, says what it holds, writes it again.
#include <ATen/ops/arange.h>

#include <cstdio>
#include <exception>
#include <string>

#include "graph/archive.h"
#include "graph/error.h"

namespace {

using namespace ikbo;         // NOLINT
using namespace ikbo::graph;  // NOLINT

Json describe_table(const std::map<std::string, Weight>& table) {
  Json result = Json::object();
  for (const auto& [name, weight] : table) {
    const at::Tensor tensor = weight_tensor(weight);
    result[name] = {{"meta", describe(weight.meta)},
                    {"parameter", weight.is_parameter},
                    {"storage", reinterpret_cast<std::uintptr_t>(weight.storage.get())},
                    {"storage_bytes", weight.storage->bytes.size()},
                    {"strides", tensor.strides().vec()}};
  }
  return result;
}

Json describe_archive(const Archive& archive) {
  Json inputs = Json::array();
  for (const UserInput& input : user_inputs(archive.program)) {
    Json keys = Json::array();
    for (const auto& key : input.keys) std::visit([&](const auto& k) { keys.push_back(k); }, key);
    inputs.push_back({{"value", input.value},
                      {"name", input.name},
                      {"path", input.path},
                      {"keys", keys},
                      {"keyword", input.keyword}});
  }
  Json samples = Json::array();
  for (const at::Tensor& sample : archive.sample_inputs) samples.push_back(sample.sizes().vec());
  return {{"weights", describe_table(archive.weights)},
          {"constants", describe_table(archive.constants)},
          {"inputs", inputs},
          {"samples", samples},
          {"extra_files", archive.extra_files}};
}

/// One more input that nothing reads, as long as the first input's batch.
void append_input(Archive& archive, const std::string& name) {
  Program& program = archive.program;
  const auto inputs = user_inputs(program);
  if (inputs.empty()) fail("the program has no tensor input");
  const TensorMeta& first = program.graph.tensors.at(inputs.front().value);
  if (first.sizes.empty()) fail("the first input has no batch");
  TensorMeta meta;
  meta.dtype = DType::kInt32;
  meta.sizes = {first.sizes.front()};
  meta.strides = {1};
  program.graph.tensors.emplace(name, meta);
  append_user_input(program, name);
  if (!archive.sample_inputs.empty()) {
    archive.sample_inputs.push_back(at::arange(archive.sample_inputs.front().size(0), at::kInt));
  }
}

int run(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "read" && argc == 3) {
    std::puts(describe_archive(read_archive(argv[2])).dump().c_str());
  } else if (command == "copy" && argc == 4) {
    write_archive(read_archive(argv[2]), argv[3]);
  } else if (command == "append" && argc == 5) {
    Archive archive = read_archive(argv[2]);
    append_input(archive, argv[4]);
    write_archive(archive, argv[3]);
  } else if (command == "check" && argc == 3) {
    const auto different = check_archive(argv[2]);
    for (const std::string& name : different) std::puts(name.c_str());
    return different.empty() ? 0 : 1;
  } else {
    std::fputs("usage: archive_tool read A | copy A B | append A B NAME | check A\n", stderr);
    return 3;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "not an ikbo::Error: %s\n", e.what());
    return 4;
  }
}
