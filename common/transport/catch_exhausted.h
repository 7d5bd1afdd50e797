// Turns want of memory or threads into a status, where peers and users enter a transport: it costs that call, not the
// process.
#pragma once

#include <new>
#include <string_view>
#include <system_error>

#include "common/base/out_of_memory.h"

namespace gradwire::transport {

// As CatchBadAlloc; a std::system_error, of a thread that cannot be started, is ResourceExhausted too.
template <typename F>
auto CatchExhausted(std::string_view what, F f) -> decltype(f()) {
  try {
    return CatchBadAlloc(what, f);
  } catch (const std::system_error& error) {
    return CatchBadAlloc(what, [&]() -> decltype(f()) {
      return absl::ResourceExhaustedError(absl::StrCat(std::string(what), ": ", error.what()));
    });
  }
}

}  // namespace gradwire::transport
