#include "bench/lce_points.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "bench/replay.h"
#include "kernels/measured_configs.h"

namespace ikbo::bench {
namespace {

using kernels::LinearCompressionConfig;
using kernels::LinearCompressionStage;
using kernels::ScalarType;
using testing::check;
using testing::DeviceBuffer;
using testing::LceInputs;
using testing::LceSize;

constexpr size_t kColdBytes = size_t{300} << 20;  // several times the L2 cache
constexpr int64_t kMostCopies = 48;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

int64_t number(const std::string& text, const std::string& point, int64_t least) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    throw std::invalid_argument("--points: '" + text + "' in '" + point + "' is no number of " + std::to_string(least) +
                                " or more");
  }
  return value;
}

LceSize parse_point(const std::string& text) {
  const std::vector<std::string> parts = split(text, ',');
  if (parts.size() < 5 || (parts[0] != "bf16" && parts[0] != "fp16")) {
    throw std::invalid_argument("--points: '" + text + "' is not TYPE,M,N,K_CAND,CANDIDATES[,ROWSxK...]");
  }
  LceSize size;
  size.type = size.out_type = parts[0] == "bf16" ? ScalarType::kBFloat16 : ScalarType::kFloat16;
  size.align_e = true;
  size.m = number(parts[1], text, 1);
  size.n = number(parts[2], text, 1);
  size.k_candidate = number(parts[3], text, 0);
  size.batch = number(parts[4], text, 1);
  for (size_t i = 5; i < parts.size(); ++i) {
    const std::vector<std::string> term = split(parts[i], 'x');
    if (term.size() != 2) {
      throw std::invalid_argument("--points: '" + parts[i] + "' in '" + text + "' is not ROWSxK");
    }
    size.broadcast.push_back({number(term[0], text, 1), number(term[1], text, 0)});
  }
  return size;
}

// Inputs in as many copies as it takes to be larger than the L2 cache; all take the weights of the first.
class PointContest {
 public:
  explicit PointContest(const LceSize& size) {
    copies_.push_back(std::make_unique<LceInputs>(size, 1000, testing::Mapping::kSorted));
    const size_t bytes = std::max<size_t>(copies_[0]->input_bytes() + copies_[0]->out_bytes(), 1);
    const int64_t copies = std::clamp<int64_t>(static_cast<int64_t>(kColdBytes / bytes), 1, kMostCopies);
    while (static_cast<int64_t>(copies_.size()) < copies) {
      copies_.push_back(std::make_unique<LceInputs>(size, 1000 + copies_.size(), testing::Mapping::kSorted));
    }
  }

  kernels::LinearCompressionShape shape() const { return kernels::shape_of(copies_[0]->problem()); }

  void add(const LinearCompressionConfig& config) {
    workspaces_.push_back(
        std::make_unique<DeviceBuffer>(kernels::linear_compression_workspace_bytes(copies_[0]->problem(), config)));
    const DeviceBuffer* workspace = workspaces_.back().get();
    contestants_.push_back({"", "ours", 0, [=, this](int call, cudaStream_t stream) {
                              auto problem = copies_[call % copies_.size()]->problem();
                              const auto& first = copies_[0]->problem();
                              problem.candidate.w = first.candidate.w;
                              for (size_t t = 0; t < problem.broadcast.size(); ++t) {
                                problem.broadcast[t].w = first.broadcast[t].w;
                              }
                              kernels::linear_compression(problem, config, workspace->as(), workspace->bytes(),
                                                          LinearCompressionStage::kFusedWs, stream);
                            }});
  }

  const std::vector<Contestant>& contestants() const { return contestants_; }

 private:
  std::vector<std::unique_ptr<LceInputs>> copies_;
  std::vector<std::unique_ptr<DeviceBuffer>> workspaces_;
  std::vector<Contestant> contestants_;
};

void measure_point(const LceSize& size, int multiprocessors, int rounds, cudaStream_t stream) {
  PointContest contest(size);
  const auto configs = kernels::measurable_linear_compression_configs(contest.shape(), multiprocessors);
  for (const LinearCompressionConfig& config : configs) {
    contest.add(config);
  }
  const std::vector<double> times = measure(contest.contestants(), rounds, stream);
  const auto chosen = kernels::choose_linear_compression_config(contest.shape(), multiprocessors);
  std::printf("{\"by_model\": {\"block_m\": %d, \"cluster\": %d}, \"configurations\": [", chosen.block_m,
              chosen.cluster);
  for (size_t i = 0; i < configs.size(); ++i) {
    std::printf("%s{\"block_m\": %d, \"cluster\": %d, \"us\": %.3f}", i == 0 ? "" : ", ", configs[i].block_m,
                configs[i].cluster, times[i]);
  }
  std::printf("]}\n");
  std::fflush(stdout);
}

// A device's name is text; what JSON wants escaped is left out.
std::string json_text(const char* name) {
  std::string text;
  for (; *name != '\0'; ++name) {
    if (*name >= ' ' && *name != '"' && *name != '\\') {
      text += *name;
    }
  }
  return text;
}

}  // namespace

std::vector<LceSize> parse_points(const std::string& text) {
  std::vector<LceSize> points;
  for (const std::string& point : split(text, ';')) {
    points.push_back(parse_point(point));
  }
  return points;
}

void measure_points(const std::vector<LceSize>& points, int rounds) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "no GPU to measure on");
  if (properties.major != 9 || properties.minor != 0) {
    throw std::invalid_argument(std::string("the GPU is a ") + properties.name + "; the kernels are built for Hopper");
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d}\n", json_text(properties.name).c_str(),
              properties.multiProcessorCount);
  std::fflush(stdout);
  for (const LceSize& point : points) {
    measure_point(point, properties.multiProcessorCount, rounds, stream);
  }
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace ikbo::bench
