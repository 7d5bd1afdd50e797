// Threads that the system may refuse: that is the caller's error to tell, not the end of the process.
#pragma once

#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace gradwire {

// Runs body() on a thread of its own. ResourceExhausted naming `what` where no thread can be had.
template <typename F>
absl::StatusOr<std::thread> StartThread(std::string_view what, F body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(std::string(what), ": no thread (", error.what(),
                                                     "): this server has too many, or too little memory"));
  }
}

}  // namespace gradwire
