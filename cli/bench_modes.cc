#include "cli/bench_modes.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "cli/auc.h"
#include "graph/error.h"
#include "runtime/device.h"
#include "runtime/model.h"
#include "runtime/overhead.h"
#include "runtime/random_inputs.h"
#include "transform/transform.h"

namespace ikbo::cli {
namespace {

using graph::Role;
using runtime::Request;
using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 5;
constexpr double kWarmUpSeconds = 2;  // enough, after two runs
// Calls are queued on a GPU for this long at a time: launching one is hidden behind those before it.
constexpr double kQueueMicroseconds = 30e3;
constexpr std::int64_t kMostQueued = 200;

struct Contestant {
  ModeResult result;
  std::unique_ptr<runtime::Model> model;
  std::vector<double> times;
  std::vector<at::Tensor> outputs;
  std::int64_t queued = 1;  // calls between two waits for the device
};

double quantile(std::vector<double> values, double q) {
  const auto position = static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(position), values.end());
  return values[position];
}

std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor values = tensor.cpu().reshape({-1}).to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

// Bytes by what the specification says an operator is there for.
void count_bytes(Contestant& contestant, const std::vector<at::Tensor>& inputs) {
  std::vector<runtime::NodeCost>& costs = contestant.result.costs;
  contestant.model->engine().run_profiled(inputs, costs);
  std::map<std::string, Role> roles;
  for (const graph::OperatorEntry& entry : contestant.model->specification().operators) roles[entry.node] = entry.role;
  for (const runtime::NodeCost& cost : costs) {
    contestant.result.peak_bytes = std::max(contestant.result.peak_bytes, cost.peak_bytes);
    const auto role = roles.find(cost.node);
    if (role == roles.end()) {
      // Arithmetic on sizes has no entry, and holds no tensor.
      if (cost.allocated_bytes > 0) fail("operator '{}' is not in the specification", cost.node);
      continue;
    }
    if (role->second == Role::kBroadcast || role->second == Role::kReplicated) {
      contestant.result.replicated_bytes += cost.allocated_bytes;
    }
    if (role->second == Role::kIkbo) {
      contestant.result.scratch_bytes += std::max<std::int64_t>(cost.allocated_bytes - cost.output_bytes, 0);
    }
  }
  contestant.result.operators = static_cast<std::int64_t>(costs.size());
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (std::size_t o = 0; o < std::min(a.size(), b.size()); ++o) {
    const std::vector<double> x = numbers(a[o]);
    const std::vector<double> y = numbers(b[o]);
    if (x.size() != y.size()) fail("the modes give outputs of different sizes");
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
      const double difference = std::abs(x[i] - y[i]);
      largest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(largest, difference);
    }
  }
  return largest;
}

struct Ranking {
  std::optional<double> pooled;
  std::optional<double> per_request;
};

// `scores` of all candidates, in the order of the requests.
Ranking rank_quality(const std::vector<Request>& requests, const std::vector<double>& scores) {
  std::vector<double> labels;
  double sum = 0;
  int counted = 0;
  for (const Request& request : requests) {
    const std::size_t begin = labels.size();
    labels.insert(labels.end(), request.labels.begin(), request.labels.end());
    const auto one = auc(std::span(scores).subspan(begin, request.labels.size()), request.labels);
    if (one) {
      sum += *one;
      ++counted;
    }
  }
  Ranking ranking;
  ranking.pooled = auc(scores, labels);
  if (counted > 0) ranking.per_request = sum / counted;
  return ranking;
}

bool labelled(const std::vector<Request>& requests) {
  return !requests.empty() && std::all_of(requests.begin(), requests.end(), [](const Request& r) {
    return static_cast<std::int64_t>(r.labels.size()) == r.count;
  });
}

class Bench {
 public:
  Bench(const graph::Archive& original, const BenchOptions& options)
      : original_(original), options_(options), device_(runtime::open_device(options.device)) {}

  BenchResult run() {
    const c10::InferenceMode inference;
    make_contestants();
    make_inputs();
    for (at::Tensor& input : inputs_) input = input.to(device_);
    for (Contestant& c : contestants_) {
      say("warming up");
      const auto start = Clock::now();
      for (int i = 0; i < std::min(kWarmUp, options_.runs); ++i) {
        time_calls(c);
        if (i > 0 && std::chrono::duration<double>(Clock::now() - start).count() > kWarmUpSeconds) break;
      }
      if (!device_.is_cpu()) {
        const double once = std::max(time_calls(c), 1.0);
        c.queued = std::clamp(static_cast<std::int64_t>(kQueueMicroseconds / once), std::int64_t{1}, kMostQueued);
      }
      count_bytes(c, inputs_);
    }
    measure();
    summarise();
    return std::move(result_);
  }

 private:
  void say(const std::string& what) const {
    if (options_.progress) options_.progress(what);
  }

  void make_contestants() {
    runtime::EngineOptions engine;
    engine.device = options_.device;
    engine.threads = options_.threads;
    result_.threads = options_.threads > 0 ? options_.threads : at::get_num_threads();
    for (const transform::Mode mode : {transform::Mode::kBroadcast, transform::Mode::kSplit, transform::Mode::kIkbo}) {
      transform::Options request;
      request.mode = mode;
      request.request_only = options_.request_only;
      request.index = options_.index;
      say("transforming (" + transform::mode_name(mode) + ")");
      const transform::Result transformed = transform::transform(original_, request);
      Contestant contestant;
      contestant.result.mode = transform::mode_name(mode);
      contestant.model = std::make_unique<runtime::Model>(transformed.archive, engine);
      if (mode == transform::Mode::kIkbo && options_.requests.empty()) draw(transformed);
      contestants_.push_back(std::move(contestant));
    }
  }

  void draw(const transform::Result& transformed) {
    runtime::RandomInputs random(transformed.archive, transformed.specification, options_.seed);
    result_.users = options_.users;
    result_.candidates = options_.users * options_.candidates;
    inputs_ = random.draw(result_.users, result_.candidates);
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (random.inputs()[i].side != graph::Side::kIndex) continue;
      inputs_[i] =
          random.mapping("even", result_.users, result_.candidates).to(graph::scalar_type(random.inputs()[i].dtype));
    }
  }

  void make_inputs() {
    // All modes take the same inputs, in the same order.
    const auto& reference = contestants_.front().model->layout().inputs();
    for (const Contestant& c : contestants_) {
      const auto& inputs = c.model->layout().inputs();
      const bool same = std::equal(inputs.begin(), inputs.end(), reference.begin(), reference.end(),
                                   [](const auto& a, const auto& b) { return a.value == b.value; });
      if (!same) fail("mode {} takes other inputs than the others", c.result.mode);
    }
    if (options_.requests.empty()) return;
    const runtime::Model& model = *contestants_.back().model;
    requests_ = runtime::read_requests(options_.requests, model.layout());
    runtime::Batch batch = model.prepare(requests_);
    if (batch.users == 0) fail("{}: no request has a candidate", options_.requests);
    result_.users = batch.users;
    result_.candidates = batch.candidates();
    inputs_ = std::move(batch.inputs);
  }

  // Microseconds of a call, the mean over those that are queued.
  double time_calls(Contestant& c) const {
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < c.queued; ++i) c.outputs = c.model->engine().run(inputs_);
    runtime::synchronize(device_);
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / static_cast<double>(c.queued);
  }

  // Round-robin in a new random order every round, so that drift of the machine falls on all alike.
  void measure() {
    std::mt19937_64 random(options_.seed);
    std::vector<std::size_t> order(contestants_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    const auto start = Clock::now();
    for (int round = 0;; ++round) {
      const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
      if (round >= options_.runs && elapsed >= options_.seconds) break;
      say(fmt::format("round {}, {:.0f} of {:.0f} s", round + 1, elapsed, options_.seconds));
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        contestants_[i].times.push_back(time_calls(contestants_[i]));
      }
      ++result_.runs;
    }
  }

  void summarise() {
    result_.overhead_ns = runtime::operator_overhead_ns();
    const bool ranks = labelled(requests_);
    for (Contestant& c : contestants_) {
      c.result.p50_us = quantile(c.times, 0.5);
      c.result.p99_us = quantile(c.times, 0.99);
      c.result.largest_difference = largest_difference(c.outputs, contestants_.front().outputs);
      if (ranks && !c.outputs.empty() && c.outputs.front().numel() == result_.candidates) {
        const Ranking ranking = rank_quality(requests_, numbers(c.outputs.front()));
        c.result.auc = ranking.pooled;
        c.result.auc_per_request = ranking.per_request;
      }
      result_.modes.push_back(c.result);
    }
    if (ranks) add_baselines();
  }

  void add_baselines() {
    for (const auto& [name, unused] : requests_.front().baselines) {
      std::vector<double> scores;
      bool complete = true;
      for (const Request& request : requests_) {
        const auto found = request.baselines.find(name);
        complete = complete && found != request.baselines.end();
        if (complete) scores.insert(scores.end(), found->second.begin(), found->second.end());
      }
      if (!complete) continue;
      const Ranking ranking = rank_quality(requests_, scores);
      result_.baselines.push_back({name, ranking.pooled, ranking.per_request});
    }
  }

  const graph::Archive& original_;
  const BenchOptions& options_;
  const c10::Device device_;
  std::vector<Contestant> contestants_;
  std::vector<Request> requests_;
  std::vector<at::Tensor> inputs_;
  BenchResult result_;
};

}  // namespace

BenchResult bench_modes(const graph::Archive& original, const BenchOptions& options) {
  return Bench(original, options).run();
}

}  // namespace ikbo::cli
