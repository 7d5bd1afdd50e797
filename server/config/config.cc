// Validation and the configuration file; see config.h.
#include "server/config/config.h"

#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "common/config/message_file.h"
#include "common/wire/frame.h"
#include "gradwire/v1/server_config.pb.h"
#include "server/config/memory.h"
#include "server/lease/lease.h"
#include "server/metrics/exporter.h"

namespace gradwire {
namespace {

constexpr uint64_t kMinFrameBytes = 64u << 10;
constexpr uint64_t kMaxFrameBytes = 4ull << 30;
constexpr uint64_t kMinMemoryBytes = 1u << 20;
constexpr uint32_t kMaxDrainMs = 600'000;
constexpr uint32_t kMaxJobs = 4096;
constexpr uint32_t kMaxSpinUs = 10'000;
constexpr uint64_t kMaxUnusedJobMs = 1'000'000'000'000;  // 31 years
constexpr uint64_t kMostDescriptors = 1u << 20;
constexpr uint64_t kFewDescriptors = 1024;
constexpr uint64_t kDescriptorsOfServer = 128;
constexpr uint64_t kDescriptorsPerJob = 4;
constexpr uint64_t kDefaultMaxConnections = 16384;
constexpr uint32_t kMaxHandshakes = 65536;
constexpr uint32_t kMaxStreams = 1u << 20;
constexpr uint64_t kMinReceiveBytes = 16u << 20;
constexpr uint64_t kDefaultReceiveBytes = 512u << 20;                               // at least
constexpr uint64_t kMessageBytes = wire::kDefaultChunkBytes + (uint64_t{1} << 10);  // of a worker, about
constexpr uint32_t kMinFollowerTimeoutMs = 100;
constexpr uint32_t kMaxFollowerTimeoutMs = 600'000;
constexpr uint32_t kMinLeaseTtlMs = 1000;
constexpr uint32_t kMaxStandbys = 64;
constexpr uint64_t kMinStandbyQueueBytes = 1u << 20;

absl::Status CheckRange(const char* knob, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %d; allowed are %d to %d", knob, value, least, most));
}

absl::Status CheckOneOf(const char* knob, const std::string& value, const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s'; allowed are %s", knob, value, absl::StrJoin(allowed, ", ")));
}

uint64_t DescriptorLimit() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? std::min<uint64_t>(limit.rlim_cur, kMostDescriptors) : kFewDescriptors;
}

// Connections leave descriptors to journals, snapshots, leases and standbys.
absl::Status FitConnections(const ServerConfig& config, uint32_t* max_connections) {
  const uint64_t descriptors = DescriptorLimit();
  const uint64_t kept =
      std::min<uint64_t>(kDescriptorsOfServer + kDescriptorsPerJob * config.max_jobs, descriptors / 2);
  const uint64_t most = std::max<uint64_t>((descriptors - kept) / config.listen.size(), 1);
  if (*max_connections == 0) *max_connections = static_cast<uint32_t>(std::min<uint64_t>(most, kDefaultMaxConnections));
  if (*max_connections <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "max_connections is %d for each of %d addresses; of %d descriptors that this process may have, %d are kept for "
      "jobs: allowed are 1 to %d, or raise the limit (ulimit -n)",
      *max_connections, config.listen.size(), descriptors, kept, most));
}

}  // namespace

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

absl::Status ServerConfig::Validate() {
  const uint64_t usable = UsableMemoryBytes();
  if (memory_limit_bytes == 0) memory_limit_bytes = usable / 10 * 7;
  if (job_memory_limit_bytes == 0) job_memory_limit_bytes = memory_limit_bytes;
  if (listen.empty()) return absl::InvalidArgumentError("no address to listen on: give --listen grpc://127.0.0.1:7070");
  GW_RETURN_IF_ERROR(CheckRange("memory_limit_bytes", memory_limit_bytes, kMinMemoryBytes, MachineMemoryBytes()));
  GW_RETURN_IF_ERROR(CheckRange("job_memory_limit_bytes", job_memory_limit_bytes, kMinMemoryBytes, memory_limit_bytes));
  GW_RETURN_IF_ERROR(CheckRange("frame_limit_bytes", frame_limit_bytes, kMinFrameBytes, kMaxFrameBytes));
  GW_RETURN_IF_ERROR(CheckRange("drain_ms", drain_ms, 0, kMaxDrainMs));
  GW_RETURN_IF_ERROR(CheckRange("snapshot_journal_bytes", snapshot_journal_bytes, 1u << 20, UINT64_MAX));
  GW_RETURN_IF_ERROR(CheckRange("max_jobs", max_jobs, 1, kMaxJobs));
  GW_RETURN_IF_ERROR(CheckRange("spin_us", spin_us, 0, kMaxSpinUs));
  GW_RETURN_IF_ERROR(CheckRange("unused_job_ms", unused_job_ms, 0, kMaxUnusedJobMs));
  GW_RETURN_IF_ERROR(CheckRange("max_handshakes", max_handshakes, 1, kMaxHandshakes));
  GW_RETURN_IF_ERROR(CheckRange("max_streams", max_streams, 1, kMaxStreams));
  if (receive_limit_bytes == 0)
    receive_limit_bytes =
        std::max(kMinReceiveBytes, std::min(std::max(kDefaultReceiveBytes, max_streams * kMessageBytes), usable / 4));
  GW_RETURN_IF_ERROR(CheckRange("receive_limit_bytes", receive_limit_bytes, kMinReceiveBytes, MachineMemoryBytes()));
  GW_RETURN_IF_ERROR(FitConnections(*this, &max_connections));
  GW_RETURN_IF_ERROR(
      CheckRange("follower_timeout_ms", follower_timeout_ms, kMinFollowerTimeoutMs, kMaxFollowerTimeoutMs));
  if (!follow.empty() && data_dir.empty()) {
    return absl::InvalidArgumentError("follow needs data_dir: a standby keeps the durable jobs of its primary");
  }
  GW_RETURN_IF_ERROR(CheckRange("lease_ttl_ms", lease_ttl_ms, kMinLeaseTtlMs, kMaxFollowerTimeoutMs));
  if (!lease.empty()) GW_RETURN_IF_ERROR(CheckLeaseAddress(lease));
  if (!lease.empty() && follow.empty()) {
    return absl::InvalidArgumentError(
        "lease needs follow: the address of the other server that may hold it, whose standby this one is meanwhile");
  }
  if (!name.empty()) GW_RETURN_IF_ERROR(CheckServerName("name", name));
  GW_RETURN_IF_ERROR(CheckRange("max_standbys", max_standbys, 0, kMaxStandbys));
  GW_RETURN_IF_ERROR(CheckRange("standby_queue_bytes", standby_queue_bytes, kMinStandbyQueueBytes, UINT64_MAX));
  if (!metrics_listen.empty()) GW_RETURN_IF_ERROR(metrics::CheckListenAddress(metrics_listen));
  if (!backend.starts_with("cpu:")) {  // which targets there are is known to MakeBackend
    GW_RETURN_IF_ERROR(CheckOneOf("backend", backend, {"auto", "cpu", "cuda", "reference"}));
  }
  return CheckOneOf("log_level", log_level, {"debug", "info", "warning", "error"});
}

absl::Status ApplyConfigFile(const std::string& path, ServerConfig* config) {
  v1::ServerConfig file;
  GW_RETURN_IF_ERROR(ReadMessageFile(path, &file));
  if (file.listen_size() > 0) config->listen.assign(file.listen().begin(), file.listen().end());
  if (file.has_memory_limit_bytes()) config->memory_limit_bytes = file.memory_limit_bytes();
  if (file.has_job_memory_limit_bytes()) config->job_memory_limit_bytes = file.job_memory_limit_bytes();
  if (file.has_device_memory_limit_bytes()) config->device_memory_limit_bytes = file.device_memory_limit_bytes();
  if (file.has_frame_limit_bytes()) config->frame_limit_bytes = file.frame_limit_bytes();
  if (file.has_drain_ms()) config->drain_ms = file.drain_ms();
  if (file.has_backend()) config->backend = file.backend();
  if (file.has_log_level()) config->log_level = file.log_level();
  if (file.has_max_jobs()) config->max_jobs = file.max_jobs();
  if (file.has_spin_us()) config->spin_us = file.spin_us();
  if (file.has_unused_job_ms()) config->unused_job_ms = file.unused_job_ms();
  if (file.has_max_connections()) config->max_connections = file.max_connections();
  if (file.has_max_handshakes()) config->max_handshakes = file.max_handshakes();
  if (file.has_max_streams()) config->max_streams = file.max_streams();
  if (file.has_receive_limit_bytes()) config->receive_limit_bytes = file.receive_limit_bytes();
  if (file.has_snapshot_journal_bytes()) config->snapshot_journal_bytes = file.snapshot_journal_bytes();
  if (file.has_data_dir()) config->data_dir = file.data_dir();
  if (file.has_follow()) config->follow = file.follow();
  if (file.has_follower_timeout_ms()) config->follower_timeout_ms = file.follower_timeout_ms();
  if (file.has_lease()) config->lease = file.lease();
  if (file.has_lease_ttl_ms()) config->lease_ttl_ms = file.lease_ttl_ms();
  if (file.has_name()) config->name = file.name();
  if (file.has_max_standbys()) config->max_standbys = file.max_standbys();
  if (file.has_standby_queue_bytes()) config->standby_queue_bytes = file.standby_queue_bytes();
  if (file.has_metrics_listen()) config->metrics_listen = file.metrics_listen();
  return absl::OkStatus();
}

}  // namespace gradwire
