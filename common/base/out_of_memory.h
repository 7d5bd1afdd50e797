// Turns a failed allocation, or a thread that cannot be started, into a status, at the edge where a peer's request
// enters: it costs that request, not the process.
#pragma once

#include <new>
#include <string_view>
#include <system_error>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace gradwire {

// ResourceExhausted; without a message where there is no memory for one.
inline absl::Status OutOf(std::string_view what, const char* why) {
  try {
    return absl::ResourceExhaustedError(absl::StrCat(std::string(what), ": ", why));
  } catch (const std::bad_alloc&) {
    return absl::Status(absl::StatusCode::kResourceExhausted, {});
  }
}

// Returns f(), a Status or StatusOr; ResourceExhausted naming `what` where it throws std::bad_alloc or
// std::system_error. Locks are released on the way; what `f` had changed stays changed. `f` is called under the locks
// that the caller holds: which they are is known there alone, so it is not analysed here.
template <typename F>
ABSL_NO_THREAD_SAFETY_ANALYSIS auto CatchBadAlloc(std::string_view what, F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return OutOf(what, "out of memory");
  } catch (const std::system_error& error) {
    return OutOf(what, error.what());
  }
}

}  // namespace gradwire
