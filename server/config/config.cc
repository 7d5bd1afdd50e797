// Validation and the configuration file; see config.h.
#include "server/config/config.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/status_macros.h"
#include "gradwire/v1/server_config.pb.h"

namespace gradwire {
namespace {

constexpr uint64_t kMinFrameBytes = 64u << 10;
constexpr uint64_t kMaxFrameBytes = 4ull << 30;
constexpr uint64_t kMinMemoryBytes = 1u << 20;
constexpr uint32_t kMaxDrainMs = 600'000;
constexpr uint32_t kMaxJobs = 4096;

uint64_t MachineMemoryBytes() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page_bytes > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 1ull << 30;
}

absl::Status CheckRange(const char* knob, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %d; allowed are %d to %d", knob, value, least, most));
}

absl::Status CheckOneOf(const char* knob, const std::string& value, const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s'; allowed are %s", knob, value, absl::StrJoin(allowed, ", ")));
}

// Keeps the first error of the text-format parser, with its position.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (text.empty()) text = absl::StrFormat("line %d, column %d: %s", line + 1, column + 1, message);
  }
  std::string text;
};

}  // namespace

absl::Status ServerConfig::Validate() {
  const uint64_t machine = MachineMemoryBytes();
  if (memory_limit_bytes == 0) memory_limit_bytes = machine / 10 * 7;
  if (job_memory_limit_bytes == 0) job_memory_limit_bytes = memory_limit_bytes;
  if (listen.empty()) return absl::InvalidArgumentError("no address to listen on: give --listen grpc://0.0.0.0:7070");
  GW_RETURN_IF_ERROR(CheckRange("memory_limit_bytes", memory_limit_bytes, kMinMemoryBytes, machine));
  GW_RETURN_IF_ERROR(CheckRange("job_memory_limit_bytes", job_memory_limit_bytes, kMinMemoryBytes, memory_limit_bytes));
  GW_RETURN_IF_ERROR(CheckRange("frame_limit_bytes", frame_limit_bytes, kMinFrameBytes, kMaxFrameBytes));
  GW_RETURN_IF_ERROR(CheckRange("drain_ms", drain_ms, 0, kMaxDrainMs));
  GW_RETURN_IF_ERROR(CheckRange("max_jobs", max_jobs, 1, kMaxJobs));
  GW_RETURN_IF_ERROR(CheckOneOf("backend", backend, {"auto", "cpu", "cuda"}));
  return CheckOneOf("log_level", log_level, {"debug", "info", "warning", "error"});
}

absl::Status ApplyConfigText(const std::string& text, const std::string& origin, ServerConfig* config) {
  v1::ServerConfig file;
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(text, &file)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %s (the fields are those of gradwire.v1.ServerConfig)", origin, error.text));
  }
  if (file.listen_size() > 0) config->listen.assign(file.listen().begin(), file.listen().end());
  if (file.memory_limit_bytes() != 0) config->memory_limit_bytes = file.memory_limit_bytes();
  if (file.job_memory_limit_bytes() != 0) config->job_memory_limit_bytes = file.job_memory_limit_bytes();
  if (file.frame_limit_bytes() != 0) config->frame_limit_bytes = file.frame_limit_bytes();
  if (file.drain_ms() != 0) config->drain_ms = file.drain_ms();
  if (!file.backend().empty()) config->backend = file.backend();
  if (!file.log_level().empty()) config->log_level = file.log_level();
  if (file.max_jobs() != 0) config->max_jobs = file.max_jobs();
  return absl::OkStatus();
}

}  // namespace gradwire
