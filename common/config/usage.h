// What a program says about wrong flags: which command, what is wrong, where help is.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

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

}  // namespace gradwire
