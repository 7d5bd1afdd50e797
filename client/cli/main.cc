// gradwire: the operator's command-line tool. Exit codes: 0 done, 1 failed, 2 wrong usage.
#include <cstdio>
#include <iostream>
#include <string>

#include "client/cli/commands.h"
#include "client/cli/options.h"

int main(int argc, char** argv) {
  const gradwire::cli::Options options = gradwire::cli::ParseOptions(argc, argv);
  if (options.exit) return options.exit_code;
  absl::Status status = gradwire::cli::RunCommand(options, std::cout);
  std::cout.flush();
  if (status.ok() && !std::cout) status = absl::UnknownError("the output could not be written");
  if (status.ok()) return 0;
  std::fprintf(stderr, "gradwire: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}
