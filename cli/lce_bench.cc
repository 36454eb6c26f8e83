#include "cli/lce_bench.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>

#include "graph/error.h"

namespace ikbo::cli {
namespace {

using graph::Json;

std::string error_text(int error) {
  return std::error_code(error, std::generic_category()).message();
}

/// A program whose output and messages come line by line through one pipe.
class Child {
 public:
  Child(const std::filesystem::path& program, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program.string());
    std::vector<char*> raw;
    for (std::string& argument : arguments) raw.push_back(argument.data());
    raw.push_back(nullptr);
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("cannot run {}: {}", program.string(), error_text(errno));
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      execv(raw[0], raw.data());
      // The caller reads this as the program's message.
      dprintf(STDERR_FILENO, "%s cannot be run: %s\n", raw[0], std::strerror(errno));
      _exit(127);
    }
    close(ends[1]);
    if (pid_ < 0) {
      close(ends[0]);
      fail("cannot run {}: {}", program.string(), error_text(errno));
    }
    output_.reset(fdopen(ends[0], "r"));
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (waited_) return;
    kill(pid_, SIGTERM);  // its answers are not wanted any more
    waitpid(pid_, nullptr, 0);
  }

  std::optional<std::string> line() {
    std::string text;
    int c = EOF;
    while ((c = std::fgetc(output_.get())) != EOF && c != '\n') text += static_cast<char>(c);
    if (c == EOF && text.empty()) return std::nullopt;
    return text;
  }

  /// 0 where it ended well.
  int wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    waited_ = true;
    return status;
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  pid_t pid_ = -1;
  bool waited_ = false;
  std::unique_ptr<std::FILE, Close> output_;
};

/// "bf16,433,256,866,1024,15x1178;...", as the program takes them.
std::string points_text(const TunePlan& plan) {
  std::string text;
  for (const graph::MeasuredCompression& shape : plan.shapes) {
    for (const graph::MeasuredPoint& point : shape.points) {
      text += fmt::format("{}{},{},{},{},{}", text.empty() ? "" : ";", shape.dtype == "float16" ? "fp16" : "bf16",
                          shape.m, shape.n, shape.k_candidate, point.candidates);
      for (std::size_t t = 0; t < point.rows.size(); ++t) {
        text += fmt::format(",{}x{}", point.rows[t], shape.k_broadcast[t]);
      }
    }
  }
  return text;
}

/// Fills a point from the program's line for it; std::exception where it is not one.
void read_point(const Json& json, graph::MeasuredPoint& point) {
  const auto block_of = [](const Json& config) { return config.at("block_m").get<int>(); };
  const auto cluster_of = [](const Json& config) { return config.at("cluster").get<int>(); };
  const Json& by_model = json.at("by_model");
  std::optional<double> chosen;
  std::optional<double> best;
  for (const Json& config : json.at("configurations")) {
    const auto time = config.at("us").get<double>();
    if (!std::isfinite(time) || time < 0) fail("a time is {}", time);
    if (block_of(config) == block_of(by_model) && cluster_of(config) == cluster_of(by_model)) chosen = time;
    if (best && time >= *best) continue;
    best = time;
    point.block_m = block_of(config);
    point.cluster = cluster_of(config);
  }
  if (!chosen) fail("the model's choice is not among the configurations");
  point.microseconds = *best;
  point.by_model_microseconds = *chosen;
}

}  // namespace

std::filesystem::path find_lce_bench() {
  if (const char* named = std::getenv("IKBO_LCE_BENCH")) return named;
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::array places = {own / "lce_bench", own.parent_path() / "kernels/bench/lce_bench"};
  for (const auto& place : places) {
    if (std::filesystem::exists(place)) return place;
  }
  fail(
      "lce_bench is not built: configure with -DIKBO_CUDA=ON -DIKBO_KERNELS_CHECKS=ON, or name it in the environment "
      "variable IKBO_LCE_BENCH (it was looked for at {} and {})",
      places[0].string(), places[1].string());
}

graph::MeasuredDevice measure_points(const TunePlan& plan, int rounds,
                                     const std::function<void(std::size_t, std::size_t)>& progress) {
  const std::filesystem::path program = find_lce_bench();
  graph::MeasuredDevice measured;
  measured.linear_compression = plan.shapes;
  std::vector<graph::MeasuredPoint*> waiting;
  for (graph::MeasuredCompression& shape : measured.linear_compression) {
    for (graph::MeasuredPoint& point : shape.points) waiting.push_back(&point);
  }
  std::size_t done = 0;
  std::string message;  // the last line that is no answer
  if (progress) progress(0, waiting.size());
  Child child(program, {"--points", points_text(plan), "--rounds", std::to_string(rounds)});
  while (const auto line = child.line()) {
    if (line->empty() || line->front() != '{') {
      if (!line->empty()) message = *line;
      continue;
    }
    try {
      const Json json = Json::parse(*line);
      if (measured.multiprocessors == 0) {
        measured.device = json.at("device").get<std::string>();
        measured.multiprocessors = json.at("multiprocessors").get<int>();
        if (measured.multiprocessors < 1) fail("there are {} multiprocessors", measured.multiprocessors);
      } else if (done < waiting.size()) {
        read_point(json, *waiting[done++]);
        if (progress) progress(done, waiting.size());
      } else {
        fail("there are more answers than points");
      }
    } catch (const std::exception& error) {
      fail("{} gave an answer that is not understood ({}): {}", program.string(), error.what(), *line);
    }
  }
  const int status = child.wait();
  if (status != 0) {
    const std::string how = WIFSIGNALED(status) ? fmt::format("was ended by signal {}", WTERMSIG(status))
                                                : fmt::format("failed with exit code {}", WEXITSTATUS(status));
    fail("measuring on the GPU {} after {} of {} points: {}", how, done, waiting.size(),
         message.empty() ? program.string() : message);
  }
  if (done != waiting.size()) fail("{} measured {} of {} points", program.string(), done, waiting.size());
  return measured;
}

}  // namespace ikbo::cli
