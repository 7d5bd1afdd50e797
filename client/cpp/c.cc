#include "gradwire/c.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/util/json_util.h"
#include "gradwire/session.h"

struct gradwire_session {
  std::unique_ptr<gradwire::Session> session;
};

namespace gradwire::c_api {
namespace {

std::string& LastError() {
  thread_local std::string text;
  return text;
}

gradwire_code Told(absl::StatusCode code, absl::string_view text) noexcept {
  try {
    LastError().assign(text.data(), text.size());
  } catch (const std::bad_alloc&) {
    LastError().clear();
  }
  return static_cast<gradwire_code>(code);
}

// Does `work`, whose status or exception becomes a code and the thread's last error.
template <typename Work>
gradwire_code Guarded(Work&& work) noexcept {
  try {
    const absl::Status status = std::forward<Work>(work)();
    return status.ok() ? GRADWIRE_OK : Told(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return Told(absl::StatusCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return Told(absl::StatusCode::kUnknown, error.what());
  }
}

template <typename Work>
gradwire_code OnSession(gradwire_session* session, Work&& work) noexcept {
  return Guarded([&] {
    if (session == nullptr) return absl::InvalidArgumentError("session is null");
    return std::forward<Work>(work)(*session->session);
  });
}

// The size of a struct as its caller knows it.
template <typename Struct>
absl::StatusOr<size_t> SizeOf(const Struct* given, absl::string_view what) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (given == nullptr) return absl::InvalidArgumentError(absl::StrCat(what, " is null"));
  const size_t size = given->struct_size;
  if (size < sizeof(size_t) || size % alignof(Struct) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ".struct_size is ", size, ": set it to the size of the struct"));
  }
  return size;
}

// What the caller knows of a struct; what lies beyond has the value 0. Refused where it knows and says more than this
// library does.
template <typename Struct>
absl::StatusOr<Struct> Known(const Struct* given, absl::string_view what) {
  const auto size = SizeOf(given, what);
  if (!size.ok()) return size.status();
  const char* const bytes = reinterpret_cast<const char*>(given);
  if (std::any_of(bytes + std::min(*size, sizeof(Struct)), bytes + *size, [](char byte) { return byte != 0; })) {
    return absl::UnimplementedError(
        absl::StrCat(what, " has fields that this library, ", GRADWIRE_VERSION, ", does not know: leave them 0"));
  }
  Struct known = {};
  std::memcpy(&known, given, std::min(*size, sizeof(Struct)));
  return known;
}

absl::Status CheckGiven(const void* pointer, size_t count, absl::string_view what) {
  if (pointer != nullptr || count == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is null, and ", count, " are to be there"));
}

absl::StatusOr<PullMode> PullOf(int32_t pull) {
  switch (pull) {
    case GRADWIRE_PULL_UPDATE:
      return PullMode::kUpdate;
    case GRADWIRE_PULL_PARAMS:
      return PullMode::kParams;
    case GRADWIRE_PULL_PARAMS_BF16:
      return PullMode::kParamsBf16;
    case GRADWIRE_PULL_MEAN:
      return PullMode::kMean;
  }
  return absl::InvalidArgumentError(absl::StrCat("options.pull is ", pull, ": there is no such pull mode"));
}

absl::StatusOr<SessionOptions> OptionsOf(const gradwire_options& given) {
  if (given.job == nullptr) return absl::InvalidArgumentError("options.job is null");
  if (given.worker == nullptr) return absl::InvalidArgumentError("options.worker is null");
  if (auto status = CheckGiven(given.servers, given.server_count, "options.servers"); !status.ok()) return status;
  if (auto status = CheckGiven(given.tensors, given.tensor_count, "options.tensors"); !status.ok()) return status;
  SessionOptions options;
  const auto parsed = google::protobuf::util::JsonStringToMessage(given.job, &options.job);
  if (!parsed.ok()) return absl::InvalidArgumentError(absl::StrCat("options.job: ", std::string(parsed.message())));
  for (size_t i = 0; i < given.server_count; ++i) {
    if (given.servers[i] == nullptr)
      return absl::InvalidArgumentError(absl::StrCat("options.servers[", i, "] is null"));
    options.servers.emplace_back(given.servers[i]);
  }
  for (size_t i = 0; i < given.tensor_count; ++i) {
    const auto status =
        CheckGiven(given.tensors[i].data, given.tensors[i].elements, absl::StrCat("options.tensors[", i, "].data"));
    if (!status.ok()) return status;
    options.memory.emplace_back(given.tensors[i].data, given.tensors[i].elements);
  }
  auto pull = PullOf(given.pull);
  if (!pull.ok()) return pull.status();
  options.pull = *pull;
  options.worker = given.worker;
  if (given.resume_from != nullptr) options.resume.from = given.resume_from;
  const std::pair<int64_t, int64_t*> timeouts[] = {{given.connect_ms, &options.timeouts.connect_ms},
                                                   {given.start_ms, &options.timeouts.start_ms},
                                                   {given.rpc_ms, &options.timeouts.rpc_ms},
                                                   {given.round_ms, &options.timeouts.round_ms},
                                                   {given.reconnect_ms, &options.timeouts.reconnect_ms}};
  for (const auto& [told, timeout] : timeouts) {
    if (told != 0) *timeout = told;
  }
  if (given.encode_threads != 0) options.encode_threads = given.encode_threads;
  if (given.notice != nullptr) {
    options.notice = [notice = given.notice, data = given.notice_data](const std::string& text) {
      notice(data, text.c_str());
    };
  }
  return options;
}

}  // namespace
}  // namespace gradwire::c_api

const char* gradwire_library_version(void) { return GRADWIRE_VERSION; }

const char* gradwire_last_error(void) { return gradwire::c_api::LastError().c_str(); }

gradwire_code gradwire_join(const gradwire_options* options, gradwire_session** session) {
  return gradwire::c_api::Guarded([&]() -> absl::Status {
    if (session == nullptr) return absl::InvalidArgumentError("session is null");
    *session = nullptr;
    const auto known = gradwire::c_api::Known(options, "options");
    if (!known.ok()) return known.status();
    auto made = gradwire::c_api::OptionsOf(*known);
    if (!made.ok()) return made.status();
    auto joined = gradwire::Session::Join(*std::move(made));
    if (!joined.ok()) return joined.status();
    *session = new gradwire_session{*std::move(joined)};
    return absl::OkStatus();
  });
}

gradwire_code gradwire_begin_round(gradwire_session* session, const float* learning_rates, size_t count) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) {
    const auto status = gradwire::c_api::CheckGiven(learning_rates, count, "learning_rates");
    return status.ok() ? s.BeginRound({learning_rates, count}) : status;
  });
}

gradwire_code gradwire_tensor_ready(gradwire_session* session, uint32_t tensor, const float* gradient) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) { return s.TensorReady(tensor, gradient); });
}

gradwire_code gradwire_rows_ready(gradwire_session* session, uint32_t tensor, const int64_t* rows, size_t row_count,
                                  const float* values) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) {
    const auto status = gradwire::c_api::CheckGiven(rows, row_count, "rows");
    return status.ok() ? s.RowsReady(tensor, {{rows, row_count}, values}) : status;
  });
}

gradwire_code gradwire_end_round(gradwire_session* session, int64_t timeout_ms) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) { return s.EndRound(timeout_ms); });
}

gradwire_code gradwire_exchange(gradwire_session* session, const float* const* gradients, size_t gradient_count,
                                const float* learning_rates, size_t rate_count) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) -> absl::Status {
    if (auto status = gradwire::c_api::CheckGiven(gradients, gradient_count, "gradients"); !status.ok()) return status;
    if (auto status = gradwire::c_api::CheckGiven(learning_rates, rate_count, "learning_rates"); !status.ok())
      return status;
    return s.Exchange({gradients, gradient_count}, {learning_rates, rate_count});
  });
}

gradwire_code gradwire_drain(gradwire_session* session, int64_t timeout_ms) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) { return s.Drain(timeout_ms); });
}

gradwire_code gradwire_save(gradwire_session* session, const char* path) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) {
    const auto status = gradwire::c_api::CheckGiven(path, 1, "path");
    return status.ok() ? s.Save(path) : status;
  });
}

gradwire_code gradwire_get_stats(const gradwire_session* session, gradwire_stats* stats) {
  return gradwire::c_api::Guarded([&]() -> absl::Status {
    if (session == nullptr) return absl::InvalidArgumentError("session is null");
    const auto size = gradwire::c_api::SizeOf(stats, "stats");
    if (!size.ok()) return size.status();
    const gradwire::SessionStats found = session->session->stats();
    const gradwire_stats out = {.struct_size = *size,
                                .steps = found.steps,
                                .skipped_rounds = found.skipped_rounds,
                                .nonfinite_rounds = found.nonfinite_rounds,
                                .pushed_bytes = found.pushed_bytes,
                                .pulled_bytes = found.pulled_bytes,
                                .members = found.members,
                                .encode_seconds = found.encode_seconds,
                                .apply_seconds = found.apply_seconds,
                                .wait_seconds = found.wait_seconds};
    std::memset(static_cast<void*>(stats), 0, *size);
    std::memcpy(stats, &out, std::min(*size, sizeof(out)));
    return absl::OkStatus();
  });
}

uint64_t gradwire_parameter_version(const gradwire_session* session) {
  return session == nullptr ? 0 : session->session->version();
}

uint64_t gradwire_start_step(const gradwire_session* session) {
  return session == nullptr ? 0 : session->session->start_step();
}

int gradwire_resumed(const gradwire_session* session) {
  return session != nullptr && session->session->resumed() ? 1 : 0;
}

gradwire_code gradwire_leave(gradwire_session* session, int drain) {
  return gradwire::c_api::OnSession(session, [&](gradwire::Session& s) { return s.Leave(drain != 0); });
}

void gradwire_free(gradwire_session* session) { delete session; }
