// Turns a failed allocation into a status, at the edge where a peer's request enters: it costs that request, not the
// process.
#pragma once

#include <new>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace gradwire {

// Returns f(), a Status or StatusOr; ResourceExhausted naming `what` where it throws std::bad_alloc. Locks are released
// on the way; what `f` had changed stays changed.
template <typename F>
auto CatchBadAlloc(std::string_view what, F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    try {
      return absl::ResourceExhaustedError(absl::StrCat(std::string(what), ": out of memory"));
    } catch (const std::bad_alloc&) {
      return absl::Status(absl::StatusCode::kResourceExhausted, {});  // without a message it allocates nothing
    }
  }
}

}  // namespace gradwire
