// The environment of the process: what reads it does so by this function, and names the variable where its flag is.
#pragma once

#include <cstdlib>
#include <string>

namespace gradwire {

// Empty where the variable is not set, too. Not thread-safe against setenv.
inline std::string EnvironmentVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace gradwire
