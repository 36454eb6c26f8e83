// Linear compression: our stages, cuBLAS and the floor, in one process and interleaved, timed on the device.
//
// usage: lce_bench [--cases main|sweep|tune] [--type bf16|fp16|both] [--rounds N] [--batch N] [--json FILE] [--filter
// NAME]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "bench/lce_contestants.h"
#include "bench/lce_steps.h"

namespace ikbo::bench {
namespace {

using kernels::LinearCompressionStage;
using kernels::ScalarType;
using testing::check;
using testing::DeviceBuffer;

constexpr double kTargetMilliseconds = 6;  // of one graph
constexpr int kMostCalls = 400;

struct Options {
  std::string cases = "main";
  std::string type = "both";
  std::string json;
  std::string filter;
  int rounds = 15;
  int64_t batch = 1024;  // of main and tune
};

struct Row {
  LceCase shape;
  std::string name;
  std::string kind;
  double microseconds = 0;
  double teraflops = 0;
};

struct Floor {
  double matmul_bf16 = 0;
  double matmul_fp16 = 0;
  double copy = 0;
};

// A contestant's calls, captured in a graph that lasts some milliseconds.
class Replay {
 public:
  Replay(const Contestant& contestant, cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) {
      check(cudaEventCreate(&event), "cudaEventCreate");
    }
    for (int call = 0; call < 3; ++call) {
      contestant.run(call, stream);
    }
    check(cudaEventRecord(events_[0], stream), "cudaEventRecord");
    for (int call = 0; call < 5; ++call) {
      contestant.run(call, stream);
    }
    check(cudaEventRecord(events_[1], stream), "cudaEventRecord");
    const double once = std::max(elapsed() / 5, 1e-3);
    calls_ = std::clamp(static_cast<int>(kTargetMilliseconds / once), 2, kMostCalls);
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
    for (int call = 0; call < calls_; ++call) {
      contestant.run(call, stream);
    }
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  ~Replay() {
    cudaGraphExecDestroy(executable_);
    for (cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  double microseconds_a_call() {
    check(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
    check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
    return elapsed() * 1e3 / calls_;
  }

 private:
  double elapsed() {
    check(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
    return milliseconds;
  }

  cudaStream_t stream_;
  cudaEvent_t events_[2]{};
  cudaGraphExec_t executable_ = nullptr;
  int calls_ = 0;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Every round replays each contestant once, so that heat and clocks are the same for all.
std::vector<double> measure(const std::vector<Contestant>& contestants, int rounds, cudaStream_t stream) {
  std::vector<std::unique_ptr<Replay>> replays;
  for (const Contestant& contestant : contestants) {
    replays.push_back(std::make_unique<Replay>(contestant, stream));
  }
  std::vector<std::vector<double>> times(contestants.size());
  for (int round = 0; round < rounds + 1; ++round) {
    for (size_t i = 0; i < replays.size(); ++i) {
      const double time = replays[i]->microseconds_a_call();
      if (round > 0) {
        times[i].push_back(time);
      }
    }
  }
  std::vector<double> medians;
  for (auto& values : times) {
    medians.push_back(median(std::move(values)));
  }
  return medians;
}

Floor measure_floor(Cublas& cublas, int rounds, cudaStream_t stream) {
  constexpr int64_t kSize = 8192;
  constexpr int64_t kCopyBytes = int64_t{1} << 31;
  DeviceBuffer a(kSize * kSize * 2), b(kSize * kSize * 2), c(kSize * kSize * 2), d(kSize * kSize * 2),
      e(kSize * kSize * 2), from(kCopyBytes), to(kCopyBytes);
  testing::fill_normal(a.as(), ScalarType::kBFloat16, kSize * kSize, 1, 1);
  testing::fill_normal(b.as(), ScalarType::kBFloat16, kSize * kSize, 1, 2);
  testing::fill_normal(c.as(), ScalarType::kFloat16, kSize * kSize, 1, 3);
  testing::fill_normal(d.as(), ScalarType::kFloat16, kSize * kSize, 1, 4);
  testing::fill_normal(from.as(), ScalarType::kFloat16, kCopyBytes / 2, 1, 5);
  const auto matmul = [&](DeviceBuffer& x, DeviceBuffer& y, ScalarType type) {
    return [&, type](int, cudaStream_t s) {
      cublas.multiply(x.as(), kSize, y.as(), e.as(), 1, kSize, kSize, kSize, type, s);
    };
  };
  const std::vector<Contestant> contestants = {
      {"matmul bf16", "floor", 0, matmul(a, b, ScalarType::kBFloat16)},
      {"matmul fp16", "floor", 0, matmul(c, d, ScalarType::kFloat16)},
      {"copy", "floor", 0, [&](int, cudaStream_t s) { copy(from.as(), to.as(), kCopyBytes, s); }},
  };
  const auto times = measure(contestants, rounds, stream);
  const double operations = 2.0 * kSize * kSize * kSize;
  return {operations / times[0] * 1e-6, operations / times[1] * 1e-6, 2.0 * kCopyBytes / times[2] * 1e-6};
}

const char* name_of(ScalarType type) {
  return type == ScalarType::kFloat16 ? "fp16" : "bf16";
}

void print(const std::vector<Row>& rows, const Floor& floor) {
  for (const Row& row : rows) {
    const double ceiling = row.shape.type == ScalarType::kFloat16 ? floor.matmul_fp16 : floor.matmul_bf16;
    std::printf("%s B %5ld ratio %4ld  %-28s %9.2f us %7.1f TFLOP/s useful, %.3f of matmul\n", name_of(row.shape.type),
                row.shape.batch, row.shape.ratio, row.name.c_str(), row.microseconds, row.teraflops,
                row.teraflops / ceiling);
  }
}

void write_json(const std::string& path, const std::vector<Row>& rows, const Floor& floor) {
  std::ofstream out(path);
  out << "{\"floor\": {\"matmul_tflops\": {\"bf16\": " << floor.matmul_bf16 << ", \"fp16\": " << floor.matmul_fp16
      << "}, \"copy_tbps\": " << floor.copy << "},\n \"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const LceCase& shape = rows[i].shape;
    out << (i == 0 ? "\n" : ",\n") << "  {\"case\": {\"B\": " << shape.batch << ", \"M\": " << shape.m
        << ", \"N\": " << shape.n << ", \"K_user\": " << shape.k_user << ", \"K_cand\": " << shape.k_candidate
        << ", \"ratio\": " << shape.ratio << ", \"dtype\": \"" << name_of(shape.type) << "\"}, \"name\": \""
        << rows[i].name << "\", \"kind\": \"" << rows[i].kind << "\", \"us\": " << rows[i].microseconds
        << ", \"useful_tflops\": " << rows[i].teraflops << "}";
  }
  out << "]}\n";
  if (!out) {
    throw std::runtime_error("cannot write " + path);
  }
}

std::vector<LceCase> cases_of(const std::string& name, int64_t main_batch) {
  if (name == "main" || name == "tune") {
    LceCase shape;
    shape.batch = main_batch;
    return {shape};
  }
  if (name == "sweep") {
    std::vector<LceCase> cases;
    for (const int64_t batch : {10, 64, 128, 512, 1024, 1536, 2048, 2560, 3072}) {
      cases.emplace_back().batch = batch;
    }
    for (const int64_t ratio : {2, 5, 10, 50, 100, 1000}) {
      cases.emplace_back().ratio = ratio;
    }
    return cases;
  }
  throw std::invalid_argument("--cases must be main, sweep or tune, not " + name);
}

std::string config_name(const std::string& stage, const kernels::LinearCompressionConfig& config) {
  return stage + " " + std::to_string(config.block_m) + " " + std::to_string(config.cluster);
}

void run(const Options& options) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Cublas cublas;
  const Floor floor = measure_floor(cublas, options.rounds, stream);
  std::printf("%s, %d multiprocessors; matmul 8192^3 bf16 %.1f fp16 %.1f TFLOP/s, copy %.2f TB/s\n", properties.name,
              properties.multiProcessorCount, floor.matmul_bf16, floor.matmul_fp16, floor.copy);
  std::vector<Row> rows;
  for (const ScalarType type : {ScalarType::kBFloat16, ScalarType::kFloat16}) {
    if (options.type != "both" && options.type != name_of(type)) {
      continue;
    }
    for (LceCase shape : cases_of(options.cases, options.batch)) {
      shape.type = type;
      const bool with_slow_stages = options.cases == "main";
      LceContest contest(shape, cublas, with_slow_stages);
      const auto choice = kernels::choose_linear_compression_config(contest.shape(), properties.multiProcessorCount);
      contest.add_ours("fused", choice, LinearCompressionStage::kFused);
      contest.add_ours("fused_ws", choice, LinearCompressionStage::kFusedWs);
      if (options.cases == "tune") {
        for (const auto& config :
             kernels::legal_linear_compression_configs(contest.shape(), properties.multiProcessorCount)) {
          contest.add_ours(config_name("fused_ws", config), config, LinearCompressionStage::kFusedWs);
        }
      }
      std::vector<Contestant> contestants;
      for (const Contestant& contestant : contest.contestants()) {
        if (contestant.name.find(options.filter) != std::string::npos) {
          contestants.push_back(contestant);
        }
      }
      const auto times = measure(contestants, options.rounds, stream);
      std::vector<Row> of_case;
      for (size_t i = 0; i < contestants.size(); ++i) {
        of_case.push_back(
            {shape, contestants[i].name, contestants[i].kind, times[i], contestants[i].operations / times[i] * 1e-6});
      }
      std::printf("-- %s, chosen block %d cluster %d ctas %d\n", name_of(type), choice.block_m, choice.cluster,
                  choice.ctas);
      print(of_case, floor);
      rows.insert(rows.end(), of_case.begin(), of_case.end());
      if (with_slow_stages) {
        const auto errors = contest.errors(true);
        std::printf(
            "error against float64: fused_ws rms %.4e largest %.4e outside %ld, broadcast rms %.4e largest %.4e\n",
            errors.ours.root_mean_square, errors.ours.largest, errors.ours.outside, errors.broadcast.root_mean_square,
            errors.broadcast.largest);
      }
      std::fflush(stdout);
    }
  }
  if (!options.json.empty()) {
    write_json(options.json, rows, floor);
  }
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    if (i + 1 == count) {
      throw std::invalid_argument(name + " needs a value");
    }
    const std::string value = arguments[i + 1];
    if (name == "--cases") {
      options.cases = value;
    } else if (name == "--type") {
      options.type = value;
    } else if (name == "--rounds") {
      options.rounds = std::stoi(value);
    } else if (name == "--batch") {
      options.batch = std::stoll(value);
    } else if (name == "--json") {
      options.json = value;
    } else if (name == "--filter") {
      options.filter = value;
    } else {
      throw std::invalid_argument("unknown option " + name);
    }
  }
  return options;
}

}  // namespace
}  // namespace ikbo::bench

int main(int count, char** arguments) {
  try {
    ikbo::bench::run(ikbo::bench::parse(count, arguments));
    return 0;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "lce_bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lce_bench: %s\n", error.what());
    return 1;
  }
}
