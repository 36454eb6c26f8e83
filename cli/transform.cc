#include "transform/transform.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/output.h"
#include "graph/archive.h"
#include "graph/error.h"

namespace ikbo::cli {
namespace {

using graph::Json;

struct TransformOptions {
  std::string archive;
  std::vector<std::string> request_only;
  std::string index;
  std::string output;
  std::string mode = "ikbo";
  std::int64_t max_users = 0;
  std::int64_t max_candidates = 0;
  bool report = false;
  bool json = false;
};

std::filesystem::path default_output(const std::filesystem::path& input) {
  std::filesystem::path output = input;
  output.replace_extension(".ikbo.pt2");
  return output;
}

const char* side_text(graph::Side side) {
  switch (side) {
    case graph::Side::kRequestOnly:
      return "once a user";
    case graph::Side::kCandidate:
      return "once a candidate";
    case graph::Side::kIndex:
      return "the user of each candidate";
    default:
      return "once a call";
  }
}

Json report_json(const transform::Result& result, const std::filesystem::path& output) {
  const transform::Report& report = result.report;
  Json json = {{"output", output.string()},
               {"mode", result.specification.mode},
               {"nodes_before", report.nodes_before},
               {"nodes_after", report.nodes_after},
               {"at_user_batch", report.at_user_batch},
               {"at_candidate_batch", report.at_candidate_batch},
               {"ikbo_operators", report.ikbo_operators},
               {"broadcasts", report.broadcasts},
               {"warnings", report.warnings}};
  json["inputs"] = Json::array();
  for (const graph::InputEntry& input : result.specification.inputs) {
    json["inputs"].push_back({{"name", input.name}, {"path", input.path}, {"batch", side_text(input.side)}});
  }
  json["stops"] = Json::array();
  for (const transform::Stop& stop : report.stops) {
    json["stops"].push_back({{"value", stop.value},
                             {"node", stop.node},
                             {"target", stop.target},
                             {"shape", stop.shape},
                             {"reason", stop.reason}});
  }
  return json;
}

void print_report(const transform::Result& result) {
  const transform::Report& report = result.report;
  if (report.stops.empty()) {
    std::cout << "\nNo user row is copied to candidates anywhere.\n";
    return;
  }
  std::cout << "\nUser rows copied to candidates, and what needs them so:\n\n";
  Table table({"value", "copied for", "shape", "why"});
  for (const transform::Stop& stop : report.stops) {
    table.add({stop.value, stop.node.empty() ? stop.target : stop.node, stop.shape, stop.reason});
  }
  std::cout << table.str(2);
}

int run(const TransformOptions& options) {
  transform::Options request;
  request.mode = transform::parse_mode(options.mode);
  request.request_only = options.request_only;
  request.index = options.index;
  if (options.max_users > 0) request.max_users = options.max_users;
  if (options.max_candidates > 0) request.max_candidates = options.max_candidates;
  const std::filesystem::path output =
      options.output.empty() ? default_output(options.archive) : std::filesystem::path(options.output);
  Progress progress("transforming " + options.archive);
  const transform::Result result = transform::transform(graph::read_archive(options.archive), request);
  progress.update("writing " + output.string());
  graph::write_archive(result.archive, output);
  if (options.json) {
    print_json(report_json(result, output));
    return kFine;
  }
  const transform::Report& report = result.report;
  Table inputs({"input", "comes"});
  for (const graph::InputEntry& input : result.specification.inputs) inputs.add({input.name, side_text(input.side)});
  std::cout << inputs.str(2) << "\n";
  std::cout << fmt::format("{} before, {} now: {} run once a user, {} once a candidate; {}, {}\n",
                           plural(report.nodes_before, "operator"), report.nodes_after, report.at_user_batch,
                           report.at_candidate_batch, plural(report.ikbo_operators, "IKBO operator"),
                           plural(report.broadcasts, "broadcast"));
  if (options.report) print_report(result);
  if (!report.warnings.empty()) {
    if (options.report) {
      std::cout << "\nMind:\n";
      for (const std::string& warning : report.warnings) std::cout << "  - " << warning << "\n";
    } else {
      std::cout << fmt::format("{}: see --report\n",
                               plural(static_cast<std::int64_t>(report.warnings.size()), "warning"));
    }
  }
  std::cout << fmt::format("\nWritten: {}\n", output.string());
  return kFine;
}

}  // namespace

void add_transform(CLI::App& app, Action& action) {
  auto options = std::make_shared<TransformOptions>();
  CLI::App* command = app.add_subcommand(
      "transform",
      "Rewrites an exported model so that request-only inputs come with one row a user.\n\n"
      "The result takes one more input, candidate_to_user, and gives the same scores. It is an archive of "
      "torch.export\n"
      "itself: torch.export.load reads it after `import ikbo`.\n\n"
      "Example:\n  ikbo transform ranker.pt2 --request-only 'user_*,hist_*' -o ranker.ikbo.pt2 --report");
  command->add_option("archive", options->archive, "Archive of torch.export.save (.pt2)")->required();
  command
      ->add_option("--request-only", options->request_only,
                   "Inputs that belong to the request: names or patterns as `ikbo inspect` shows them (user_*), or\n"
                   "columns of a packed input (X[:,0:17]); several by commas")
      ->required();
  command->add_option("--index", options->index,
                      "For a model that looks up request-only rows by an input of its own (x[index]): that input. The\n"
                      "result takes it in place of candidate_to_user");
  command->add_option("-o,--output", options->output, "Where to write it; default: the archive's name with .ikbo.pt2");
  command
      ->add_option("--mode", options->mode,
                   "ikbo: copies sunk as far as they go; split: copies where user and candidate meet (net-splitting);\n"
                   "broadcast: inputs copied first, then the original model")
      ->check(CLI::IsMember({"ikbo", "split", "broadcast"}))
      ->capture_default_str();
  command->add_option("--max-users", options->max_users, "Most users in one call")->check(CLI::PositiveNumber);
  command->add_option("--max-candidates", options->max_candidates, "Most candidates in one call")
      ->check(CLI::PositiveNumber);
  command->add_flag("--report", options->report, "Say where user rows are still copied, and why");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace ikbo::cli
