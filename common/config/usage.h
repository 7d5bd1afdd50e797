// How programs read their flags, and what they say about wrong ones: which command, what is wrong, where help is.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace gradwire {

// "gradwire job create: --spec is required\nSee `gradwire job create --help`.\n": the command is the one that was being
// parsed.
inline std::string UsageError(const CLI::App* app, const CLI::Error& error) {
  std::string command = app->get_name();
  for (; !app->get_subcommands().empty(); app = app->get_subcommands().front()) {
    command += " " + app->get_subcommands().front()->get_name();
  }
  return command + ": " + error.what() + "\nSee `" + command + " --help`.\n";
}

// Parses into what `app` was given. Returns no value, or the status to exit with: 0 after --help and the like, 2 where
// a flag is wrong, which stderr has been told. A flag with nothing behind its "=" (a variable that is not set) is
// wrong: CLI11 would take the next flag for its value.
inline std::optional<int> ParseArguments(CLI::App& app, int argc, const char* const* argv) {
  app.failure_message(UsageError);
  try {
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
        throw CLI::ArgumentMismatch(std::string(argument) + " has no value; leave the flag out, or give it one");
      }
    }
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // the edge of CLI11, which reports by exceptions
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace gradwire
