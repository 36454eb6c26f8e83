// `ikbo tune`: which configuration of a kernel is the fastest, for a shape (`ikbo tune lce`) or for all of a model,
// whose archive then keeps it.
#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/lce_bench.h"
#include "cli/output.h"
#include "cli/tune_points.h"
#include "graph/archive.h"
#include "graph/error.h"
#include "runtime/model.h"

namespace ikbo::cli {
namespace {

using graph::Json;

struct TuneOptions {
  std::string archive;
  std::string output;
  TuneRequest request;
  int rounds = 15;
  bool json = false;
};

double gain(const graph::MeasuredPoint& point) {
  return point.microseconds > 0 ? point.by_model_microseconds / point.microseconds - 1 : 0;
}

void print(const graph::MeasuredDevice& measured, const TunePlan& plan) {
  std::cout << fmt::format("{}, {} multiprocessors\n\n", measured.device, measured.multiprocessors)
            << configurations_text({measured}) << "\n";
  double product = 1;
  std::size_t better = 0;
  std::size_t count = 0;
  for (const graph::MeasuredCompression& shape : measured.linear_compression) {
    for (const graph::MeasuredPoint& point : shape.points) {
      product *= 1 + gain(point);
      better += point.microseconds < point.by_model_microseconds ? 1 : 0;
      ++count;
    }
  }
  std::cout << fmt::format(
      "At {} of {} something is faster than the model's choice, {:.1f}% in geometric mean of all.\n", better,
      plural(static_cast<std::int64_t>(count), "point"),
      100 * (std::pow(product, 1.0 / static_cast<double>(count)) - 1));
  if (!plan.skipped.empty()) std::cout << "\nLeft out:\n";
  for (const std::string& reason : plan.skipped) std::cout << "  - " << reason << "\n";
}

int run(const TuneOptions& options) {
  if (options.archive.empty()) fail("name an archive to tune, or a kernel (ikbo tune lce); see ikbo tune --help");
  if (options.output.empty()) fail("name the file to write: ikbo tune {} -o FILE", options.archive);
  graph::Archive archive = graph::read_archive(options.archive);
  graph::Specification specification = runtime::specification_of(archive);
  const TunePlan plan = plan_tuning(archive, specification, options.request);
  // What would fail at the end had better fail before minutes of measuring.
  const std::filesystem::path folder = std::filesystem::path(options.output).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder)) {
    fail("{}: the folder {} does not exist", options.output, folder.string());
  }
  graph::MeasuredDevice measured;
  {
    Progress progress("measuring");
    measured = measure_points(plan, options.rounds, [&](std::size_t done, std::size_t all) {
      progress.update(fmt::format("{} of {} points", done, all));
    });
  }
  store(specification, measured);
  // The rest of the specification stays as it is written, with what a later version may have added.
  std::string& file = archive.extra_files.at(graph::Specification::kFile);
  Json json = Json::parse(file);
  json["configurations"] = graph::measured_to_json(specification.configurations);
  file = json.dump();
  graph::write_archive(archive, options.output);
  if (options.json) {
    print_json({{"output", options.output},
                {"configurations", graph::measured_to_json({measured})},
                {"skipped", plan.skipped}});
    return kFine;
  }
  print(measured, plan);
  std::cout << fmt::format("\nWritten: {}\n", options.output);
  return kFine;
}

}  // namespace

std::string configurations_text(const std::vector<graph::MeasuredDevice>& devices) {
  using Align = Table::Align;
  Table table({"W and E", "candidates", "users", "model's choice", "fastest", "gain", "configuration"},
              {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight, Align::kRight, Align::kLeft});
  for (const graph::MeasuredDevice& device : devices) {
    for (const graph::MeasuredCompression& shape : device.linear_compression) {
      std::string name = fmt::format("{} x ({} + {}) x {} {}", shape.m, fmt::join(shape.k_broadcast, " + "),
                                     shape.k_candidate, shape.n, shape.dtype);
      for (const graph::MeasuredPoint& point : shape.points) {
        table.add({name, count_text(point.candidates), fmt::format("{}", fmt::join(point.rows, ", ")),
                   fmt::format("{:.1f} µs", point.by_model_microseconds), fmt::format("{:.1f} µs", point.microseconds),
                   fmt::format("{:.1f}%", 100 * gain(point)),
                   fmt::format("{} rows of W, {}", point.block_m, plural(point.cluster, "CTA"))});
        name.clear();
      }
    }
  }
  return table.str();
}

void add_tune(CLI::App& app, Action& action) {
  auto options = std::make_shared<TuneOptions>();
  CLI::App* tune = app.add_subcommand(
      "tune",
      "Measures which configurations of kernels are the fastest for a model, and keeps them in its archive.\n\n"
      "Every linear compression of a transformed archive in 16 bits is measured on this machine's GPU, at several\n"
      "numbers of candidates and users. A runtime on the same kind of GPU takes the configuration of the nearest "
      "point;\n"
      "scores do not change, whichever it takes. `ikbo tune lce` measures one shape and keeps nothing.\n\n"
      "Example:\n  ikbo tune ranker.ikbo.pt2 -o ranker.tuned.pt2 --candidates 500,2000");
  tune->require_subcommand(0, 1);
  tune->add_option("archive", options->archive, "Transformed archive");
  tune->add_option("-o,--output", options->output,
                   "Where to write it with what was measured; may be the archive itself");
  tune->add_option("--candidates", options->request.candidates,
                   "Numbers of candidates in a call, by commas; default: those of 16, 64, 256, 1024 and 4096 that the\n"
                   "archive allows, and the most it does where that is less")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  auto* users = tune->add_option("--users", options->request.users,
                                 "Numbers of users in a call, by commas: each is measured with every number of "
                                 "candidates that\nis no smaller; default: by --ratio")
                    ->delimiter(',')
                    ->check(CLI::PositiveNumber);
  tune->add_option("--ratio", options->request.ratio, "Candidates of each user")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->excludes(users);
  tune->add_option("--rounds", options->rounds, "Every round plays each configuration once; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  tune->add_flag("--json", options->json, "Print JSON");
  tune->callback([options, tune, &action] {
    if (tune->get_subcommands().empty()) {
      action = [options] { return run(*options); };
      return;
    }
    for (const CLI::Option* option : tune->get_options()) {
      if (option->count() == 0) continue;
      action = [name = option->get_name()]() -> int {
        fail("{} belongs to `ikbo tune ARCHIVE`, not to a kernel: see ikbo tune lce --help", name);
      };
    }
  });
  add_tune_lce(*tune, action);
}

}  // namespace ikbo::cli
