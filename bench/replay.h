// Times on the device of contestants that take turns.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "bench/lce_contestants.h"

namespace ikbo::bench {

constexpr double kTargetMilliseconds = 6;  // of one graph
constexpr int kMostCalls = 400;

// A contestant's calls, captured in a graph that lasts some milliseconds.
class Replay {
 public:
  Replay(const Contestant& contestant, cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) {
      testing::check(cudaEventCreate(&event), "cudaEventCreate");
    }
    for (int call = 0; call < 3; ++call) {
      contestant.run(call, stream);
    }
    testing::check(cudaEventRecord(events_[0], stream), "cudaEventRecord");
    for (int call = 0; call < 5; ++call) {
      contestant.run(call, stream);
    }
    testing::check(cudaEventRecord(events_[1], stream), "cudaEventRecord");
    const double once = std::max(elapsed() / 5, 1e-3);
    calls_ = std::clamp(static_cast<int>(kTargetMilliseconds / once), 2, kMostCalls);
    cudaGraph_t graph = nullptr;
    testing::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
    for (int call = 0; call < calls_; ++call) {
      contestant.run(call, stream);
    }
    testing::check(cudaStreamEndCapture(stream, &graph), "capture");
    testing::check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    testing::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
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
    testing::check(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
    testing::check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    testing::check(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
    return elapsed() * 1e3 / calls_;
  }

 private:
  double elapsed() {
    testing::check(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    float milliseconds = 0;
    testing::check(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
    return milliseconds;
  }

  cudaStream_t stream_;
  cudaEvent_t events_[2]{};
  cudaGraphExec_t executable_ = nullptr;
  int calls_ = 0;
};

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Every round replays each contestant once, so that heat and clocks are the same for all.
inline std::vector<double> measure(const std::vector<Contestant>& contestants, int rounds, cudaStream_t stream) {
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

}  // namespace ikbo::bench
