// The flags of a benchmark: `tests/bench/run NAME --help` prints them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <optional>
#include <string>

#include "common/config/usage.h"

namespace gradwire::bench {

class Flags {
 public:
  // `name`: as in tests/bench/run NAME.
  Flags(const std::string& name, const std::string& what) : app_(what, "tests/bench/run " + name) {
    Add("--json", &json_, "Where the JSON goes; tests/bench/run says build/bench/" + name + ".json")->take_last();
  }

  // What *value holds is the default.
  template <class T>
  CLI::Option* Add(const std::string& flag, T* value, const std::string& help) {
    return app_.add_option(flag, *value, help)->capture_default_str();
  }
  // A flag that programs give one another.
  template <class T>
  void AddHidden(const std::string& flag, T* value) {
    app_.add_option(flag, *value)->group("");
  }

  // Ends the program after --help, and with status 2 where a flag is wrong.
  void Parse(int argc, const char* const* argv) {
    if (const std::optional<int> status = ParseArguments(app_, argc, argv)) std::exit(*status);
  }

  const std::string& json() const { return json_; }

 private:
  CLI::App app_;
  std::string json_;
};

}  // namespace gradwire::bench
