// gradwire trace: what the shards note of the next rounds of a job that trains; see commands.h.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cpp/internal/shard_server.h"
#include "client/cpp/internal/shard_trace.h"
#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "common/trace/chrome_trace.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire::cli {
namespace {

using client::Server;

constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr uint64_t kMostAhead = 4096;  // rounds that may go by while the shards are told

// The newest version that a shard of the job has.
absl::StatusOr<uint64_t> VersionOf(const std::vector<Server>& servers, const std::string& job) {
  uint64_t version = 0;
  v1::DescribeJobRequest request;
  request.set_job(job);
  for (const Server& server : servers) {
    GW_ASSIGN_OR_RETURN(const v1::JobStatus status, server.Call<v1::JobStatus>("DescribeJob", request));
    version = std::max(version, status.version());
  }
  return version;
}

client::OperatorCall CallOf(const Server& server) {
  return [&server](std::string_view method, std::string request) {
    return server.CallBytes(std::string(method), std::move(request));
  };
}

// Tells every shard before the first of the rounds begins, however fast they go.
absl::StatusOr<client::TracedRounds> Record(const std::vector<Server>& servers, const Options& options) {
  client::TracedRounds rounds{options.job, 0, options.rounds};
  GW_ASSIGN_OR_RETURN(uint64_t version, VersionOf(servers, options.job));
  // The open round has begun: the first that is whole is the next one.
  for (uint64_t ahead = 1; ahead <= kMostAhead && version >= rounds.first; ahead *= 2) {
    rounds.first = version + ahead;
    for (const Server& server : servers) GW_RETURN_IF_ERROR(client::RecordShardTrace(CallOf(server), rounds));
    GW_ASSIGN_OR_RETURN(version, VersionOf(servers, options.job));
  }
  return rounds;
}

// Asked before the wait, and not when the rounds are over. A file that is there stays as it is.
absl::Status CheckWritable(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  const bool there = std::filesystem::exists(status);
  if (there && !std::filesystem::is_regular_file(status)) return absl::OkStatus();  // a pipe is opened once
  const bool writable = std::ofstream(path, std::ios::binary | std::ios::app).is_open();
  if (writable && !there) std::filesystem::remove(path, error);
  if (writable) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--out: '", path, "' cannot be written"));
}

}  // namespace

absl::Status Trace(const Options& options, std::ostream& out) {
  GW_RETURN_IF_ERROR(RequireServers(options));
  std::vector<Server> servers;
  for (const std::string& address : options.servers) {
    GW_ASSIGN_OR_RETURN(Server server, Server::ConnectServing(address, options.timeout_ms));
    servers.push_back(std::move(server));
  }
  GW_RETURN_IF_ERROR(CheckWritable(options.out_path));
  GW_ASSIGN_OR_RETURN(const client::TracedRounds rounds, Record(servers, options));
  const absl::Time deadline = absl::Now() + absl::Seconds(options.wait_s);
  uint64_t version = 0;
  while (version <= rounds.first + rounds.count && absl::Now() < deadline) {
    absl::SleepFor(kPoll);
    GW_ASSIGN_OR_RETURN(version, VersionOf(servers, options.job));
  }
  SteadyClock clock;
  std::vector<TracedProcess> processes;
  for (const Server& server : servers) {
    const auto shard = static_cast<uint32_t>(processes.size());
    GW_ASSIGN_OR_RETURN(TracedProcess process, client::ReadShardTrace(CallOf(server), rounds, shard, &clock));
    processes.push_back(std::move(process));
  }
  if (version <= rounds.first)
    return absl::DeadlineExceededError(
        absl::StrCat("job '", options.job, "' made no round within ", options.wait_s, " s: is anybody training?"));
  client::AlignToFirst(&processes);
  std::ofstream file(options.out_path, std::ios::binary | std::ios::trunc);
  file << ChromeTrace(processes, {});
  file.close();
  if (!file.good()) return absl::UnknownError(absl::StrCat("'", options.out_path, "' cannot be written"));
  const uint64_t last = std::min(version, rounds.first + rounds.count) - 1;
  uint64_t dropped = 0;
  for (const TracedProcess& process : processes) dropped += process.dropped;
  out << (options.json
              ? absl::StrFormat("{\"file\":%s,\"first_round\":%d,\"last_round\":%d,\"dropped_events\":%d}\n",
                                Quoted(options.out_path), rounds.first, last, dropped)
              : absl::StrFormat("%s: rounds %d to %d of job %s\n", options.out_path, rounds.first, last, options.job));
  if (dropped > 0 && !options.json)
    out << absl::StrFormat("%d events found no room on the shards, the last ones: ask for fewer --rounds\n", dropped);
  return absl::OkStatus();
}

}  // namespace gradwire::cli
