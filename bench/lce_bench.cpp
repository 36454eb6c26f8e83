// Linear compression: our stages, cuBLAS and the floor, in one process and interleaved, timed on the device.
//
// usage: lce_bench [--cases main|sweep|tune] [--type bf16|fp16|both] [--stage NAME] [--rounds N] [--json FILE]
//                  [--batch N] [--ratio N] [--m N] [--n N] [--k-user N] [--k-cand N]
//        lce_bench --points POINTS [--rounds N]      see lce_points.h
// `ikbo bench lce`, `ikbo tune lce` and `ikbo tune ARCHIVE` run it.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <stdexcept>

#include "bench/lce_contestants.h"
#include "bench/lce_points.h"
#include "bench/lce_steps.h"
#include "bench/replay.h"

namespace ikbo::bench {
namespace {

using kernels::LinearCompressionStage;
using kernels::ScalarType;
using testing::check;
using testing::DeviceBuffer;

struct Options {
  std::string cases = "main";
  std::string type = "both";
  std::string json;
  std::string stage;
  std::string points;
  int rounds = 15;
  LceCase shape;  // a sweep varies its batch and its ratio
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

std::vector<LceCase> cases_of(const Options& options) {
  if (options.cases == "main" || options.cases == "tune") {
    return {options.shape};
  }
  if (options.cases == "sweep") {
    std::vector<LceCase> cases;
    for (const int64_t batch : {10, 64, 128, 512, 1024, 1536, 2048, 2560, 3072}) {
      cases.emplace_back(options.shape).batch = batch;
    }
    for (const int64_t ratio : {2, 5, 10, 50, 100, 1000}) {
      cases.emplace_back(options.shape).ratio = ratio;
    }
    return cases;
  }
  throw std::invalid_argument("--cases must be main, sweep or tune, not " + options.cases);
}

std::string config_name(const kernels::LinearCompressionConfig& config) {
  return "block_m " + std::to_string(config.block_m) + ", cluster " + std::to_string(config.cluster) +
         (config.broadcast_blocks == 1 ? ", small broadcast tiles" : "");
}

// All configurations of a shape, the fastest first.
void tune(const LceCase& shape, Cublas& cublas, const Floor& floor, int multiprocessors, int rounds,
          std::vector<Row>& rows, cudaStream_t stream) {
  LceContest contest(shape, cublas, false);
  const auto chosen = kernels::choose_linear_compression_config(contest.shape(), multiprocessors);
  const size_t others = contest.contestants().size();
  for (const auto& config : kernels::legal_linear_compression_configs(contest.shape(), multiprocessors)) {
    contest.add_ours(config_name(config), config, LinearCompressionStage::kFusedWs);
  }
  const std::vector<Contestant> contestants(contest.contestants().begin() + static_cast<std::ptrdiff_t>(others),
                                            contest.contestants().end());
  const auto times = measure(contestants, rounds, stream);
  std::vector<Row> found;
  for (size_t i = 0; i < contestants.size(); ++i) {
    found.push_back({shape, contestants[i].name, "ours", times[i], contestants[i].operations / times[i] * 1e-6});
  }
  std::sort(found.begin(), found.end(), [](const Row& a, const Row& b) { return a.microseconds < b.microseconds; });
  print(found, floor);
  const auto choice =
      std::find_if(found.begin(), found.end(), [&](const Row& row) { return row.name == config_name(chosen); });
  std::printf("best: %s. Chosen without measuring: %s, %.1f%% slower.\n", found.front().name.c_str(),
              config_name(chosen).c_str(), 100 * (choice->microseconds / found.front().microseconds - 1));
  rows.insert(rows.end(), found.begin(), found.end());
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
    for (LceCase shape : cases_of(options)) {
      shape.type = type;
      if (options.cases == "tune") {
        tune(shape, cublas, floor, properties.multiProcessorCount, options.rounds, rows, stream);
        continue;
      }
      const bool with_slow_stages = options.cases == "main";
      LceContest contest(shape, cublas, with_slow_stages);
      const auto choice = kernels::choose_linear_compression_config(contest.shape(), properties.multiProcessorCount);
      contest.add_ours("fused", choice, LinearCompressionStage::kFused);
      contest.add_ours("fused_ws", choice, LinearCompressionStage::kFusedWs);
      std::vector<Contestant> contestants;
      for (const Contestant& contestant : contest.contestants()) {
        if (contestant.name.find(options.stage) != std::string::npos) {
          contestants.push_back(contestant);
        }
      }
      if (contestants.empty()) {
        throw std::invalid_argument("no stage has '" + options.stage + "' in its name");
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
  const std::map<std::string, std::string*> texts = {{"--cases", &options.cases},
                                                     {"--type", &options.type},
                                                     {"--json", &options.json},
                                                     {"--stage", &options.stage},
                                                     {"--points", &options.points}};
  const std::map<std::string, int64_t*> sizes = {
      {"--batch", &options.shape.batch}, {"--ratio", &options.shape.ratio},   {"--m", &options.shape.m},
      {"--n", &options.shape.n},         {"--k-user", &options.shape.k_user}, {"--k-cand", &options.shape.k_candidate}};
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    if (i + 1 == count) {
      throw std::invalid_argument(name + " needs a value");
    }
    const std::string value = arguments[i + 1];
    if (texts.contains(name)) {
      *texts.at(name) = value;
    } else if (sizes.contains(name)) {
      *sizes.at(name) = std::stoll(value);
    } else if (name == "--rounds") {
      options.rounds = std::stoi(value);
    } else {
      throw std::invalid_argument("unknown option " + name);
    }
  }
  const LceCase& shape = options.shape;
  for (const int64_t size : {shape.batch, shape.ratio, shape.m, shape.n, shape.k_user, shape.k_candidate}) {
    if (size < 1) {
      throw std::invalid_argument("sizes must be positive");
    }
  }
  return options;
}

}  // namespace
}  // namespace ikbo::bench

int main(int count, char** arguments) {
  try {
    const auto options = ikbo::bench::parse(count, arguments);
    if (options.points.empty()) {
      ikbo::bench::run(options);
    } else {
      ikbo::bench::measure_points(ikbo::bench::parse_points(options.points), options.rounds);
    }
    return 0;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "lce_bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lce_bench: %s\n", error.what());
    return 1;
  }
}
