#include <algorithm>
#include <filesystem>
#include <iostream>

#include "cli/bench_modes.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "graph/archive.h"
#include "graph/error.h"

namespace ikbo::cli {
namespace {

using graph::Json;

struct BenchCommand {
  std::string archive;
  std::string output;
  std::size_t operators = 0;
  bool json = false;
  BenchOptions options;
};

Json optional(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// Rows as all results of this project have them.
Json to_json(const BenchResult& result, const BenchCommand& command) {
  const Json place = {{"model", std::filesystem::path(command.archive).stem().string()},
                      {"users", result.users},
                      {"candidates", result.candidates}};
  Json json = {{"device", command.options.device},
               {"threads", result.threads},
               {"runs", result.runs},
               {"operator_overhead_ns", result.overhead_ns}};
  json["rows"] = Json::array();
  for (const ModeResult& mode : result.modes) {
    json["rows"].push_back({{"case", place},
                            {"name", mode.mode},
                            {"kind", mode.mode == "ikbo" ? "ours" : "peer"},
                            {"us", mode.p50_us},
                            {"us_p99", mode.p99_us},
                            {"replicated_bytes", mode.replicated_bytes},
                            {"scratch_bytes", mode.scratch_bytes},
                            {"peak_bytes", mode.peak_bytes},
                            {"operators", mode.operators},
                            {"largest_difference", mode.largest_difference},
                            {"auc", optional(mode.auc)},
                            {"auc_per_request", optional(mode.auc_per_request)}});
  }
  json["baselines"] = Json::array();
  for (const BaselineResult& baseline : result.baselines) {
    json["baselines"].push_back({{"name", baseline.name},
                                 {"auc", optional(baseline.auc)},
                                 {"auc_per_request", optional(baseline.auc_per_request)}});
  }
  return json;
}

std::string auc_text(const std::optional<double>& value) {
  return value ? fmt::format("{:.4f}", *value) : "-";
}

void print(const BenchResult& result, const BenchCommand& command) {
  using Align = Table::Align;
  std::cout << fmt::format("{}, {} in one call; {}; {}; {} runs of each mode, interleaved\n\n",
                           plural(result.users, "user"), plural(result.candidates, "candidate"), command.options.device,
                           plural(result.threads, "thread"), count_text(result.runs));
  bool ranks = false;
  for (const ModeResult& mode : result.modes) ranks = ranks || mode.auc.has_value();
  std::vector<std::string> header{"mode",    "p50",         "p99",       "user rows copied",
                                  "scratch", "peak memory", "operators", "score difference"};
  if (ranks) header.insert(header.end(), {"AUC", "AUC a user"});
  std::vector<Align> align(header.size(), Align::kRight);
  align[0] = Align::kLeft;
  Table table(header, align);
  for (const ModeResult& mode : result.modes) {
    std::vector<std::string> row{mode.mode,
                                 microseconds_text(mode.p50_us),
                                 microseconds_text(mode.p99_us),
                                 bytes_text(mode.replicated_bytes),
                                 bytes_text(mode.scratch_bytes),
                                 bytes_text(mode.peak_bytes),
                                 fmt::format("{}", mode.operators),
                                 mode.mode == "broadcast" ? "-" : number_text(mode.largest_difference)};
    if (ranks) row.insert(row.end(), {auc_text(mode.auc), auc_text(mode.auc_per_request)});
    table.add(std::move(row));
  }
  for (const BaselineResult& baseline : result.baselines) {
    table.add({baseline.name, "", "", "", "", "", "", "", auc_text(baseline.auc), auc_text(baseline.auc_per_request)});
  }
  std::cout << table.str() << "\n";
  std::cout << "broadcast         every user row copied to each candidate, then the original model\n"
               "split             user work once a user, copies where user and candidate meet (net-splitting)\n"
               "ikbo              user work once a user, copies sunk as far as they go, IKBO operators\n"
               "user rows copied  bytes that the allocator gave to operators holding user rows at the candidate batch\n"
               "scratch           bytes allocated inside IKBO operators beyond their results\n"
               "peak memory       most bytes in use at a time during a call, beyond weights and inputs; on one thread\n"
               "score difference  largest, to broadcast\n";
  if (ranks) {
    std::cout
        << "AUC               over all candidates of the file with its labels; AUC a user: mean over the requests\n"
           "                  that have both labels\n";
  }
  std::cout << fmt::format("An executed operator costs {:.0f} ns over its kernel.\n", result.overhead_ns);
}

// Where a mode's time goes: its costliest operators.
void print_operators(const ModeResult& mode, std::size_t count) {
  using Align = Table::Align;
  std::vector<runtime::NodeCost> costs = mode.costs;
  std::stable_sort(costs.begin(), costs.end(),
                   [](const auto& a, const auto& b) { return a.microseconds > b.microseconds; });
  double all = 0;
  for (const runtime::NodeCost& cost : costs) all += cost.microseconds;
  std::cout << fmt::format("\n{}: {} in its operators, one run on one thread\n\n", mode.mode, microseconds_text(all));
  Table table({"operator", "node", "time", "allocated"}, {Align::kLeft, Align::kLeft, Align::kRight, Align::kRight});
  for (std::size_t i = 0; i < std::min(count, costs.size()); ++i) {
    table.add({costs[i].target, costs[i].node, microseconds_text(costs[i].microseconds),
               bytes_text(costs[i].allocated_bytes)});
  }
  std::cout << table.str();
}

int run(BenchCommand& command) {
  const graph::Archive original = graph::read_archive(command.archive);
  Progress progress("measuring");
  command.options.progress = [&](const std::string& state) { progress.update(state); };
  const BenchResult result = bench_modes(original, command.options);
  const Json json = to_json(result, command);
  if (!command.output.empty()) write_json(command.output, json);
  if (command.json) {
    print_json(json);
  } else {
    print(result, command);
    for (const ModeResult& mode : result.modes) {
      if (command.operators > 0) print_operators(mode, command.operators);
    }
    if (!command.output.empty()) std::cout << fmt::format("Written: {}\n", command.output);
  }
  return kFine;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto command = std::make_shared<BenchCommand>();
  CLI::App* bench = app.add_subcommand("bench",
                                       "Measures a model in several modes, or a kernel.\n\nExample:\n  ikbo bench "
                                       "model ranker.pt2 --request-only 'user_*'");
  bench->require_subcommand(1);
  add_bench_lce(*bench, action);
  CLI::App* sub = bench->add_subcommand(
      "model",
      "Measures three ways to run a model in one process: broadcast, split and ikbo.\n\n"
      "The modes are made in memory from the original archive, run on the same call in turn and in random order. "
      "Times\n"
      "are those of a call of the model on joined tensors. With a request file that has \"labels\", the AUC is shown\n"
      "too, and that of each of its \"baselines\".\n\n"
      "Example:\n  ikbo bench model ranker.pt2 --request-only 'user_*,hist_*' --requests requests.json");
  sub->add_option("archive", command->archive, "Original archive")->required();
  sub->add_option("--request-only", command->options.request_only, "As for `ikbo transform`")->required();
  sub->add_option("--index", command->options.index, "As for `ikbo transform`");
  auto* requests =
      sub->add_option("--requests", command->options.requests, "Request file (JSON); default: random inputs");
  sub->add_option("--users", command->options.users, "Users in a call of random inputs")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->excludes(requests);
  sub->add_option("--candidates", command->options.candidates, "Candidates of each user")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->excludes(requests);
  sub->add_option("--device", command->options.device, "Where to run: cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--seconds", command->options.seconds, "How long to measure")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--runs", command->options.runs, "Runs of each mode, at least")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--operators", command->operators, "Show this many of each mode's costliest operators");
  sub->add_option("--seed", command->options.seed, "Of random inputs and of the order")->capture_default_str();
  sub->add_option("--threads", command->options.threads, "Threads; default: all cores")->check(CLI::PositiveNumber);
  sub->add_option("-o,--output", command->output, "Write the figures to this file (JSON)");
  sub->add_flag("--json", command->json, "Print JSON");
  sub->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace ikbo::cli
