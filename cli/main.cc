// The `ikbo` command: one sub-command a file.
#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "cli/commands.h"
#include "graph/error.h"
#include "runtime/process_memory.h"

namespace {

using ikbo::cli::kBadInput;

constexpr const char* kDescription =
    "Ranks with PyTorch models without copying the user to every candidate.\n"
    "\n"
    "A ranking model is exported once with torch.export; `ikbo transform` rewrites it so that what belongs to the\n"
    "request (the user, the history) comes with one row a user, and `ikbo score` ranks with it.\n"
    "\n"
    "Example:\n"
    "  ikbo transform ranker.pt2 --request-only 'user_*,hist_*' -o ranker.ikbo.pt2\n"
    "  ikbo verify ranker.pt2 ranker.ikbo.pt2\n"
    "  ikbo score ranker.ikbo.pt2 --requests requests.json --top 10\n"
    "\n"
    "`ikbo COMMAND --help` says more. Exit codes: 0 fine, 1 a check failed (verify, inspect --check), 2 bad input.";

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Lists commands with the first line of what they do; the rest is in their own help.
class BriefFormatter final : public CLI::Formatter {
 public:
  std::string make_subcommand(const CLI::App* command) const override {
    std::ostringstream out;
    CLI::detail::format_help(out, command->get_display_name(), first_line(command->get_description()),
                             get_column_width());
    return out.str();
  }
};

int complain(const std::string& message) {
  std::cerr << "ikbo: " << message << "\n";
  return kBadInput;
}

int run(int argc, char** argv) {
  CLI::App app{kDescription, "ikbo"};
  app.set_version_flag("--version", "ikbo " IKBO_VERSION);
  app.require_subcommand(1);
  app.formatter(std::make_shared<BriefFormatter>());  // commands added later take it over
  ikbo::cli::Action action;
  ikbo::cli::add_inspect(app, action);
  ikbo::cli::add_transform(app, action);
  ikbo::cli::add_verify(app, action);
  ikbo::cli::add_spec(app, action);
  ikbo::cli::add_score(app, action);
  ikbo::cli::add_bench(app, action);
  ikbo::cli::add_tune(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? ikbo::cli::kFine : kBadInput;
  }
  return action ? action() : kBadInput;
}

}  // namespace

int main(int argc, char** argv) {
  ikbo::runtime::keep_freed_memory();
  try {
    const int code = run(argc, argv);
    std::cout.flush();
    // A full disk or a closed pipe must not look like success.
    return std::cout ? code : complain("the output could not be written");
  } catch (const ikbo::Error& error) {
    return complain(error.what());
  } catch (const c10::Error& error) {
    return complain(first_line(error.what_without_backtrace()));
  } catch (const std::bad_alloc&) {
    return complain("out of memory");
  } catch (const std::exception& error) {
    return complain(first_line(error.what()));
  } catch (...) {
    return complain("failed for a reason that is not known");
  }
}
