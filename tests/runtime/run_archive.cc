// Runs an archive on tensors that another program wrote, for tests that compare with Python:
//   run_archive ARCHIVE FOLDER... [--float64] [--threads N] [--time RUNS] [--seed N]
// FOLDER/inputs.json lists {"dtype", "sizes", "strides"} and FOLDER/input_<i>.bin holds the storage; outputs are
// written the same way, contiguous. With --time, the median of RUNS runs on each folder is printed in microseconds.
// --seed is of the random numbers that a program draws.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>

#include "graph/archive.h"
#include "graph/error.h"
#include "runtime/engine.h"
#include "runtime/process_memory.h"

namespace {

using ikbo::graph::Json;

at::ScalarType type_of(const std::string& name) {
  for (int code = 1; code < 31; ++code) {
    const auto dtype = static_cast<ikbo::graph::DType>(code);
    if (ikbo::graph::dtype_name(dtype) == name) return ikbo::graph::scalar_type(dtype);
  }
  ikbo::fail("no type '{}'", name);
}

std::vector<at::Tensor> read_inputs(const std::string& folder) {
  std::ifstream list(folder + "/inputs.json");
  std::vector<at::Tensor> tensors;
  for (const Json& entry : Json::parse(list)) {
    const auto sizes = entry.at("sizes").get<std::vector<std::int64_t>>();
    const auto strides = entry.at("strides").get<std::vector<std::int64_t>>();
    at::Tensor tensor = at::empty_strided(sizes, strides, type_of(entry.at("dtype")));
    std::ifstream file(folder + "/input_" + std::to_string(tensors.size()) + ".bin", std::ios::binary);
    file.read(static_cast<char*>(tensor.storage().mutable_data()),
              static_cast<std::streamsize>(tensor.storage().nbytes()));
    if (!file && tensor.numel() > 0) ikbo::fail("input {} is too short", tensors.size());
    tensors.push_back(tensor);
  }
  return tensors;
}

void write_outputs(const std::string& folder, const std::vector<at::Tensor>& outputs) {
  Json list = Json::array();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor tensor = outputs[i].contiguous();
    list.push_back({{"dtype", ikbo::graph::dtype_name(ikbo::graph::dtype_of(tensor.scalar_type()))},
                    {"sizes", tensor.sizes().vec()}});
    std::ofstream file(folder + "/output_" + std::to_string(i) + ".bin", std::ios::binary);
    file.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  }
  std::ofstream(folder + "/outputs.json") << list.dump();
}

double median_microseconds(const ikbo::runtime::Engine& engine, const std::vector<at::Tensor>& inputs, int runs) {
  std::vector<double> times;
  for (int i = 0; i < runs + runs / 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    engine.run(inputs);
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  times.erase(times.begin(), times.begin() + runs / 5);
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[static_cast<std::size_t>(runs / 2)];
}

int run(const std::vector<std::string>& arguments) {
  ikbo::runtime::EngineOptions options;
  std::vector<std::string> places;
  int timed = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--float64") {
      options.float64 = true;
    } else if (arguments[i] == "--threads") {
      options.threads = std::stoi(arguments.at(++i));
    } else if (arguments[i] == "--seed") {
      at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
      generator.set_current_seed(std::stoull(arguments.at(++i)));
    } else if (arguments[i] == "--time") {
      timed = std::stoi(arguments.at(++i));
    } else {
      places.push_back(arguments[i]);
    }
  }
  const auto engine = ikbo::runtime::make_eager_engine(ikbo::graph::read_archive(places.at(0)), options);
  for (std::size_t i = 1; i < places.size(); ++i) {
    const std::vector<at::Tensor> inputs = read_inputs(places[i]);
    write_outputs(places[i], engine->run(inputs));
    if (timed > 0) std::cout << median_microseconds(*engine, inputs, timed) << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ikbo::runtime::keep_freed_memory();
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
