#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <numeric>

#include "cli/commands.h"
#include "cli/output.h"
#include "graph/archive.h"
#include "graph/error.h"
#include "runtime/model.h"

namespace ikbo::cli {
namespace {

using graph::Json;
using runtime::Request;
using runtime::Scores;

struct ScoreOptions {
  std::string archive;
  std::string requests;
  std::string output;
  std::string device = "cpu";
  std::int64_t top = 10;
  std::int64_t show = -1;
  int threads = 0;
  bool json = false;
};

constexpr std::size_t kHistoryShown = 10;

// The score a candidate is ranked by: its one number in the first output.
std::vector<double> ranking_scores(const Request& request, const Scores& scores) {
  if (scores.outputs.empty()) fail("the model has no outputs");
  const at::Tensor& first = scores.outputs.front();
  if (request.count > 0 && first.numel() != request.count) {
    fail("the model's first output has {} numbers a candidate, so there is no one score to rank by",
         first.numel() / request.count);
  }
  const at::Tensor values = first.reshape({-1}).to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

// Best first; NaN last; candidates with equal scores in the order they came.
std::vector<std::size_t> ranked(const std::vector<double>& scores) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (std::isnan(scores[a]) || std::isnan(scores[b])) return !std::isnan(scores[a]) && std::isnan(scores[b]);
    return scores[a] > scores[b];
  });
  return order;
}

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json nested(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return number(tensor.item().toDouble());
  Json list = Json::array();
  for (std::int64_t i = 0; i < tensor.size(0); ++i) list.push_back(nested(tensor.select(0, i)));
  return list;
}

Json to_json(std::span<const Request> requests, std::span<const Scores> scores) {
  Json list = Json::array();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Json entry = {{"id", requests[i].id}};
    entry["scores"] = scores[i].outputs.empty() ? Json::array() : nested(scores[i].outputs.front());
    for (std::size_t o = 1; o < scores[i].outputs.size(); ++o) {
      entry["output_" + std::to_string(o)] = nested(scores[i].outputs[o]);
    }
    list.push_back(std::move(entry));
  }
  return {{"requests", std::move(list)}};
}

void print_request(const Request& request, const Scores& scores, std::int64_t top) {
  std::cout << fmt::format("\n{}: {}\n", request.id, plural(request.count, "candidate"));
  if (!request.history_names.empty()) {
    const std::size_t shown = std::min(kHistoryShown, request.history_names.size());
    std::cout << fmt::format("\n  History, newest last ({} of {}):\n", shown, request.history_names.size());
    for (std::size_t i = request.history_names.size() - shown; i < request.history_names.size(); ++i) {
      std::cout << "    " << request.history_names[i] << "\n";
    }
    std::cout << "\n";
  }
  const std::vector<double> values = ranking_scores(request, scores);
  using Align = Table::Align;
  std::vector<std::string> header{"rank", "score", "candidate"};
  std::vector<Align> align{Align::kRight, Align::kRight, request.names.empty() ? Align::kRight : Align::kLeft};
  if (!request.labels.empty()) {
    header.emplace_back("label");
    align.push_back(Align::kRight);
  }
  Table table(std::move(header), std::move(align));
  std::int64_t rank = 0;
  for (const std::size_t c : ranked(values)) {
    if (rank++ == top) break;
    std::vector<std::string> row{fmt::format("{}", rank), fmt::format("{:.6f}", values[c]),
                                 request.names.empty() ? fmt::format("{}", c) : request.names[c]};
    if (!request.labels.empty()) row.push_back(fmt::format("{:g}", request.labels[c]));
    table.add(std::move(row));
  }
  if (request.count > 0) std::cout << table.str(2);
}

int run(const ScoreOptions& options) {
  runtime::EngineOptions engine;
  engine.device = options.device;
  engine.threads = options.threads;
  const runtime::Model model(graph::read_archive(options.archive), engine);
  Progress progress("reading " + options.requests);
  const std::vector<Request> requests = runtime::read_requests(options.requests, model.layout());
  progress.update("scoring");
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Scores> scores = model.score(requests);
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  if (!options.output.empty()) write_json(options.output, to_json(requests, scores));
  if (options.json) {
    print_json(to_json(requests, scores));
    return kFine;
  }
  std::int64_t candidates = 0;
  for (const Request& request : requests) candidates += request.count;
  std::cout << fmt::format("{} of {} scored in one call, {} (the first call, checks included)\n",
                           plural(candidates, "candidate"), plural(static_cast<std::int64_t>(requests.size()), "user"),
                           microseconds_text(elapsed.count()));
  const std::size_t shown =
      options.show < 0 ? requests.size() : std::min(requests.size(), static_cast<std::size_t>(options.show));
  for (std::size_t i = 0; i < shown; ++i) print_request(requests[i], scores[i], options.top);
  if (shown < requests.size()) {
    std::cout << fmt::format("\n... and {} more\n", plural(static_cast<std::int64_t>(requests.size() - shown), "user"));
  }
  if (!options.output.empty()) std::cout << fmt::format("\nWritten: {}\n", options.output);
  return kFine;
}

}  // namespace

void add_score(CLI::App& app, Action& action) {
  auto options = std::make_shared<ScoreOptions>();
  CLI::App* command = app.add_subcommand(
      "score",
      "Ranks the candidates of requests with a transformed archive.\n\n"
      "All requests of the file are joined into one call: one row a user, one row a candidate. A request file is "
      "JSON:\n"
      "  {\"requests\": [{\"id\": \"anna\", \"user\": {\"user_id\": 7, \"hist_item\": [3, 9]},\n"
      "                 \"candidates\": {\"item_id\": [4, 5, 6]}, \"names\": [\"x\", \"y\", \"z\"]}]}\n"
      "Bags given as values and offsets are lists of values: one for the user, one for each candidate; their offsets "
      "are not given.\n"
      "Inputs are named as `ikbo inspect` names them; \"names\", \"labels\", \"baselines\" and \"history_names\" may "
      "be "
      "left out.\n\n"
      "Example:\n  ikbo score ranker.ikbo.pt2 --requests requests.json --top 10 -o scores.json");
  command->add_option("archive", options->archive, "Transformed archive")->required();
  command->add_option("--requests", options->requests, "Request file (JSON)")->required();
  command->add_option("-o,--output", options->output, "Write all scores to this file (JSON), in the order of the file");
  command->add_option("--top", options->top, "Candidates to print for each request")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--show", options->show, "Requests to print; default: all")->check(CLI::NonNegativeNumber);
  command->add_option("--device", options->device, "Where to run: cpu, cuda or cuda:N")->capture_default_str();
  command->add_option("--threads", options->threads, "Threads; default: all cores")->check(CLI::PositiveNumber);
  command->add_flag("--json", options->json, "Print all scores as JSON instead");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace ikbo::cli
