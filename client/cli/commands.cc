// Commands that ask servers; see commands.h.
#include "client/cli/commands.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/shard_server.h"
#include "common/base/status_macros.h"
#include "common/config/message_file.h"
#include "common/job/job.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire::cli {
namespace {

constexpr double kMsPerSecond = 1000;

using client::Server;

constexpr absl::Duration kPollSnapshot = absl::Milliseconds(20);
constexpr int kSnapshotTries = 5;

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

absl::StatusOr<std::vector<Server>> ConnectAll(const Options& options) {
  GW_RETURN_IF_ERROR(RequireServers(options));
  std::vector<Server> servers;
  for (const std::string& address : options.servers) {
    GW_ASSIGN_OR_RETURN(Server server, Server::ConnectServing(address, options.timeout_ms));
    servers.push_back(std::move(server));
  }
  return servers;
}

template <typename Reply>
struct Answer {
  std::string address;
  absl::StatusOr<Reply> reply;
};

// Every server is asked, also behind one that fails.
template <typename Reply, typename Request>
std::vector<Answer<Reply>> AskEach(const Options& options, const std::string& method, const Request& request) {
  std::vector<Answer<Reply>> answers;
  for (const std::string& addresses : options.servers) {
    const absl::StatusOr<Server> server = Server::ConnectServing(addresses, options.timeout_ms);
    if (server.ok())
      answers.push_back({server->address(), server->template Call<Reply>(method, request)});
    else
      answers.push_back({addresses, server.status()});
  }
  return answers;
}

// A JSON array, or of each server what `row` makes of its reply, or its error. Returns the first error.
template <typename Reply, typename Row>
absl::Status Print(const Options& options, const std::vector<Answer<Reply>>& answers, std::ostream& out,
                   const std::string& title, Row row) {
  absl::Status failed;
  if (options.json) out << "[";
  if (!options.json && std::ranges::any_of(answers, [](const auto& answer) { return answer.reply.ok(); })) out << title;
  for (const Answer<Reply>& answer : answers) {
    failed.Update(answer.reply.status());
    const std::string error(answer.reply.status().message());
    if (options.json) {
      out << (&answer == &answers.front() ? "" : ",") << "{\"server\":" << Quoted(answer.address)
          << (answer.reply.ok() ? ",\"status\":" + ToJson(*answer.reply) : ",\"error\":" + Quoted(error)) << "}";
    } else if (answer.reply.ok()) {
      row(answer.address, *answer.reply);
    } else if (answers.size() > 1) {  // of a single one the command tells it
      out << answer.address << ": FAILED: " << error << "\n";
    }
  }
  if (options.json) out << "]\n";
  return failed;
}

template <typename Reply, typename Request, typename Row>
absl::Status AskAll(const Options& options, const std::string& method, const Request& request, std::ostream& out,
                    const std::string& title, Row row) {
  GW_RETURN_IF_ERROR(RequireServers(options));
  return Print(options, AskEach<Reply>(options, method, request), out, title, row);
}

// A server that has no such job (any more) is no failure where another one had it: the command is given again when one
// was away.
absl::Status DeleteJob(const Options& options, std::ostream& out) {
  GW_RETURN_IF_ERROR(RequireServers(options));
  v1::DeleteJobRequest request;
  request.set_job(options.job);
  auto answers = AskEach<v1::DeleteJobReply>(options, "DeleteJob", request);
  std::set<std::string> had_none;
  for (const auto& answer : answers)
    if (absl::IsNotFound(answer.reply.status())) had_none.insert(answer.address);
  if (std::ranges::any_of(answers, [](const auto& answer) { return answer.reply.ok(); })) {
    for (auto& answer : answers)
      if (had_none.contains(answer.address)) answer.reply = v1::DeleteJobReply();
  }
  return Print(options, answers, out, "", [&](const std::string& address, const v1::DeleteJobReply&) {
    out << address << (had_none.contains(address) ? ": has no job " : ": deleted job ") << options.job << "\n";
  });
}

void PrintDurability(const v1::DurabilityStatus& status, std::ostream& out) {
  if (status.level() == v1::DURABILITY_UNSPECIFIED || status.level() == v1::DURABILITY_NONE) {
    out << "  durability none\n";
    return;
  }
  out << absl::StrFormat("  durability %s, version %d is safe, journal %s, %d records in %d syncs\n",
                         status.level() == v1::DURABILITY_FSYNC ? "fsync" : "interval", status.durable_version(),
                         HumanBytes(static_cast<double>(status.journal_bytes())), status.records(), status.syncs());
  if (status.snapshot_version() > 0) out << absl::StrFormat("  snapshot of version %d\n", status.snapshot_version());
  if (!status.snapshot_error().empty()) out << absl::StrFormat("  snapshot FAILED: %s\n", status.snapshot_error());
  if (status.degraded()) {
    out << absl::StrFormat("  durability DEGRADED: %s; %s wait in memory\n", status.reason(),
                           HumanBytes(static_cast<double>(status.backlog_bytes())));
  }
  if (status.hole())
    out << "  durability DEGRADED: update frames were given up, a restart loses what came after them\n";
}

void PrintRounds(const v1::JobStatus& job, std::ostream& out) {
  const uint32_t staleness = job.spec().rounds().staleness();
  if (job.spec().rounds().mode() == v1::ROUNDS_ASYNC) {
    out << absl::StrFormat(
        "  asynchronous, every bucket is at version %d or later, members %d, frames up to %d versions old\n",
        job.rounds().open_round(), job.rounds().members(), staleness);
    return;
  }
  out << absl::StrFormat("  round %d is open, members %d", job.rounds().open_round(), job.rounds().members());
  if (const uint32_t quorum = job.spec().rounds().quorum(); quorum > 0) {
    out << absl::StrFormat(", quorum %d, then waits for the others ", quorum);
    if (job.rounds().deadline_ms() > 0) {
      out << absl::StrFormat("%.1f ms", job.rounds().deadline_ms());
    } else {
      out << "until their leases end: nothing learned yet";
    }
    out << absl::StrFormat("; %d rounds closed without a member", job.rounds().short_rounds());
  }
  if (job.spec().nonfinite() == v1::NONFINITE_SKIP) {
    out << absl::StrFormat(", skipped for a gradient that was not finite: %d", job.rounds().nonfinite_rounds());
  }
  if (staleness > 0) out << absl::StrFormat(", staleness %d: so many more may be open behind it", staleness);
  out << "\n";
}

void PrintJob(const std::string& address, const v1::JobStatus& job, std::ostream& out) {
  out << absl::StrFormat("%s: job %s, shard %d of %d, version %d%s\n", address, job.job(), job.shard_index(),
                         job.shard_count(), job.version(), job.initialized() ? "" : ", waiting for initial parameters");
  out << absl::StrFormat("  elements %d, memory up to %s, layout %016x\n", job.elements(),
                         HumanBytes(static_cast<double>(job.memory_bytes())), job.layout_digest());
  out << absl::StrFormat(
      "  pushed %s, pulled %s, parameters received %s, sent %s\n", HumanBytes(static_cast<double>(job.push_bytes())),
      HumanBytes(static_cast<double>(job.pull_bytes())), HumanBytes(static_cast<double>(job.initialize_bytes())),
      HumanBytes(static_cast<double>(job.parameter_bytes())));
  out << absl::StrFormat("  decoded elements %d, deferred %d\n", job.update_elements(), job.deferred_elements());
  out << absl::StrFormat("  frames refused %d, not included %d; non-finite gradient elements taken as 0: %d\n",
                         job.refused_frames(), job.not_included_frames(), job.sanitized_elements());
  PrintRounds(job, out);
  PrintDurability(job.durability(), out);
  for (const v1::FollowerStatus& follower : job.followers()) {
    out << absl::StrFormat("  standby %s has version %d, %s\n", follower.follower(), follower.version(),
                           follower.in_sync() ? "in sync" : "NOT in sync: rounds do not wait for it");
  }
  for (const v1::BucketTraffic& t : job.traffic()) {
    const std::string pushes = t.dense_pushes() == 0                  ? "sparse"
                               : t.dense_pushes() == t.contributors() ? "dense"
                                                                      : absl::StrFormat("%d dense", t.dense_pushes());
    out << absl::StrFormat(
        "  bucket %d, %s, round %d: pushes of %d workers %s, update %s; density %.4g %%, gamma %.2f; push and update "
        "would take dense %s, coordinates %s, bitmap %s, gaps %s, sketch %s\n",
        t.bucket(), t.codec(), t.round(), t.contributors(), pushes, t.dense_update() ? "dense" : "sparse",
        100 * t.density(), t.gamma(), HumanBytes(static_cast<double>(t.dense_bytes())),
        HumanBytes(static_cast<double>(t.coordinates_bytes())), HumanBytes(static_cast<double>(t.bitmap_bytes())),
        HumanBytes(static_cast<double>(t.gaps_bytes())), HumanBytes(static_cast<double>(t.sketch_bytes())));
  }
  if (!job.parameters_sha256().empty()) out << "  parameters sha256 " << job.parameters_sha256() << "\n";
  if (job.workers_size() > 0) {
    out << absl::StrFormat("  %-24s %-16s %-7s %6s %12s %8s %12s %12s %8s\n", "worker", "incarnation", "state", "from",
                           "lease left", "frames", "bytes", "held up", "too late");
  }
  for (const v1::WorkerStatus& worker : job.workers()) {
    out << absl::StrFormat("  %-24s %016x %-7s %6d %9d ms %8d %12s %10.1f s %8d\n", worker.worker(),
                           worker.incarnation(), worker.member() ? "member" : "joining", worker.joined_round(),
                           worker.lease_left_ms(), worker.frames(),
                           HumanBytes(static_cast<double>(worker.frame_bytes())),
                           static_cast<double>(worker.held_up_ms()) / kMsPerSecond, worker.not_included_frames());
  }
}

absl::Status CreateJob(const Options& options, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadSpec(options.spec_path));
  GW_RETURN_IF_ERROR(Job::Make(spec).status());
  GW_ASSIGN_OR_RETURN(const std::vector<Server> servers, ConnectAll(options));
  std::string json;
  for (size_t i = 0; i < servers.size(); ++i) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = spec;
    request.set_shard_index(static_cast<uint32_t>(i));
    request.set_shard_count(static_cast<uint32_t>(servers.size()));
    GW_ASSIGN_OR_RETURN(const v1::CreateJobReply reply, servers[i].Call<v1::CreateJobReply>("CreateJob", request));
    if (options.json) {
      json += absl::StrFormat("%s{\"server\":%s,\"shard_index\":%d,\"layout_digest\":\"%016x\"}", i == 0 ? "" : ",",
                              Quoted(servers[i].address()), i, reply.layout_digest());
    } else {
      out << absl::StrFormat("%s: job %s, shard %d of %d, layout %016x\n", servers[i].address(), spec.name(), i,
                             servers.size(), reply.layout_digest());
    }
  }
  if (options.json) out << "[" << json << "]\n";
  return absl::OkStatus();
}

absl::StatusOr<v1::JobStatus> StatusOf(const Server& server, const std::string& job) {
  v1::DescribeJobRequest request;
  request.set_job(job);
  return server.Call<v1::JobStatus>("DescribeJob", request);
}

// Whether what has ended since `before` was asked for then: one that was being taken already holds an earlier version.
bool AnswersSnapshot(const v1::JobStatus& before, const v1::DurabilityStatus& status) {
  if (status.snapshots() == before.durability().snapshots()) return false;
  return !status.snapshot_error().empty() || status.snapshot_version() >= before.version();
}

// Asks every shard for a snapshot and waits for all; their versions, in order.
absl::StatusOr<std::vector<uint64_t>> TakeSnapshotsOnce(const Options& options, const std::vector<Server>& servers) {
  v1::TakeSnapshotRequest request;
  request.set_job(options.job);
  std::vector<v1::JobStatus> before;
  std::set<uint32_t> shards;
  for (const Server& server : servers) {
    GW_ASSIGN_OR_RETURN(before.emplace_back(), StatusOf(server, options.job));
    shards.insert(before.back().shard_index());
  }
  if (const uint32_t count = before[0].shard_count(); shards.size() != count) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "job '%s' has %d shards, and the servers given have %d of them: name those of all, for nothing can be restored "
        "without one",
        options.job, count, shards.size()));
  }
  for (const Server& server : servers) {
    GW_RETURN_IF_ERROR(server.Call<v1::TakeSnapshotReply>("TakeSnapshot", request).status());
  }
  const absl::Time deadline = absl::Now() + absl::Milliseconds(options.timeout_ms);
  std::vector<uint64_t> versions;
  for (size_t i = 0; i < servers.size(); ++i) {
    v1::DurabilityStatus status;
    do {
      absl::SleepFor(kPollSnapshot);
      GW_ASSIGN_OR_RETURN(const v1::JobStatus now, StatusOf(servers[i], options.job));
      status = now.durability();
      if (absl::Now() > deadline) {
        return absl::DeadlineExceededError(absl::StrFormat(
            "%s: no snapshot of job '%s' within %d ms; it is taken when the open round ends, then written in the "
            "background, and comes even so: give --timeout-ms, or look at `gradwire job describe`",
            servers[i].address(), options.job, options.timeout_ms));
      }
    } while (!AnswersSnapshot(before[i], status));
    if (!status.snapshot_error().empty()) {
      return absl::UnavailableError(absl::StrFormat("%s: no snapshot of job '%s' was taken: %s", servers[i].address(),
                                                    options.job, status.snapshot_error()));
    }
    versions.push_back(status.snapshot_version());
  }
  return versions;
}

// Every shard takes its own, at its next round boundary. Where rounds go on between two of these, versions differ: then
// all are asked again, so that copies of the snapshots can be restored together.
absl::Status TakeSnapshots(const Options& options, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const std::vector<Server> servers, ConnectAll(options));
  std::vector<uint64_t> versions;
  bool same = false;
  for (int tries = 0; tries < kSnapshotTries && !same; ++tries) {
    GW_ASSIGN_OR_RETURN(versions, TakeSnapshotsOnce(options, servers));
    same = std::equal(versions.begin() + 1, versions.end(), versions.begin());
  }
  std::string json;
  for (size_t i = 0; i < servers.size(); ++i) {
    if (options.json) {
      json += absl::StrFormat("%s{\"server\":%s,\"version\":%d}", i == 0 ? "" : ",", Quoted(servers[i].address()),
                              versions[i]);
    } else {
      out << absl::StrFormat("%s: job %s, snapshot of version %d\n", servers[i].address(), options.job, versions[i]);
    }
  }
  if (options.json) out << "[" << json << "]\n";
  if (!same && !options.json) {
    out << "The versions differ, since rounds went on: `gradwire restore` needs the journals beside these snapshots.\n";
  }
  return absl::OkStatus();
}

std::string HumanSeconds(uint64_t seconds) {
  if (seconds < 120) return absl::StrFormat("%d s", seconds);
  if (seconds < 7200) return absl::StrFormat("%d min", seconds / 60);
  return seconds < 172'800 ? absl::StrFormat("%d h", seconds / 3600) : absl::StrFormat("%d days", seconds / 86'400);
}

bool IsDurable(const v1::JobStatus& job) { return job.durability().level() > v1::DURABILITY_NONE; }

std::string StateOf(const v1::JobStatus& job) {
  std::string state = job.rounds().open() ? "training"
                      : job.initialized() ? "waits for workers"
                                          : "waits for parameters";
  if (job.joined() == 0) state = absl::StrFormat("unused for %s", HumanSeconds(job.unused_s()));
  absl::StrAppend(&state, IsDurable(job) ? ", durable" : "");
  return state + (job.durability().degraded() || job.durability().hole() ? ", DEGRADED" : "");
}

// Whether a job is in use is asked of all servers before anything is deleted; each looks once more when it deletes.
absl::Status PruneJobs(const Options& options, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const std::vector<Server> servers, ConnectAll(options));
  std::vector<v1::ListJobsReply> lists;
  std::map<std::string, bool> unused;  // on every server that has it
  for (const Server& server : servers) {
    GW_ASSIGN_OR_RETURN(lists.emplace_back(), server.Call<v1::ListJobsReply>("ListJobs", v1::ListJobsRequest()));
    for (const v1::JobStatus& job : lists.back().jobs()) {
      const bool here = job.joined() == 0 && job.unused_s() >= options.unused_s;
      unused[job.job()] = unused.try_emplace(job.job(), true).first->second && here;
    }
  }
  std::string json;
  for (size_t i = 0; i < servers.size(); ++i) {
    for (const v1::JobStatus& job : lists[i].jobs()) {
      if (!unused[job.job()]) continue;
      std::string kept = IsDurable(job) ? "durable: `gradwire job delete` deletes it" : "";
      if (kept.empty()) {
        v1::DeleteJobRequest request;
        request.set_job(job.job());
        request.set_only_unused(true);
        request.set_version(job.version());
        const absl::Status deleted = servers[i].Call<v1::DeleteJobReply>("DeleteJob", request).status();
        if (!deleted.ok() && !absl::IsFailedPrecondition(deleted) && !absl::IsNotFound(deleted)) return deleted;
        kept = std::string(deleted.message());
      }
      absl::StrAppend(&json, json.empty() ? "" : ",", "{\"server\":", Quoted(servers[i].address()),
                      ",\"job\":", Quoted(job.job()), ",\"deleted\":", kept.empty() ? "true" : "false",
                      ",\"why\":", Quoted(kept), "}");
      if (options.json) continue;
      out << absl::StrFormat("%s: job %s, unused for %s, %s%s\n", servers[i].address(), job.job(),
                             HumanSeconds(job.unused_s()), kept.empty() ? "deleted" : "kept: ", kept);
    }
  }
  if (options.json) out << "[" << json << "]\n";
  return absl::OkStatus();
}

absl::Status ListJobs(const Options& options, std::ostream& out) {
  const std::string title = absl::StrFormat("%-28s %-24s %9s %10s %7s %9s %12s %12s %s\n", "server", "job", "shard",
                                            "version", "workers", "age", "elements", "memory", "state");
  return AskAll<v1::ListJobsReply>(options, "ListJobs", v1::ListJobsRequest(), out, title,
                                   [&out](const std::string& address, const v1::ListJobsReply& reply) {
                                     for (const v1::JobStatus& job : reply.jobs()) {
                                       out << absl::StrFormat(
                                           "%-28s %-24s %4d/%-4d %10d %7d %9s %12d %12s %s\n", address, job.job(),
                                           job.shard_index(), job.shard_count(), job.version(), job.joined(),
                                           HumanSeconds(job.age_s()), job.elements(),
                                           HumanBytes(static_cast<double>(job.memory_bytes())), StateOf(job));
                                     }
                                   });
}

std::string StateOf(const v1::ShardStatus& status) {
  if (status.fenced()) return "FENCED: " + status.fenced_why();
  if (!status.following().empty()) return "standby of " + status.following();
  return status.draining() ? "draining" : "serving";
}

// A shard and its standbys, each by itself. One that does not answer is shown; the command fails where none of a shard
// does.
absl::Status DescribeShards(const Options& options, std::ostream& out) {
  GW_RETURN_IF_ERROR(RequireServers(options));
  if (!options.json) {
    out << absl::StrFormat("%-28s %-8s %-14s %9s %5s %12s %12s %11s %s\n", "server", "version", "backend", "uptime",
                           "jobs", "memory", "limit", "epoch", "state");
  }
  absl::Status failed;
  std::string json;
  for (const std::string& shard : options.servers) {
    absl::Status silent;
    bool answered = false;
    const std::vector<std::string> addresses = absl::StrSplit(shard, '|');
    for (const std::string& address : addresses) {
      GW_ASSIGN_OR_RETURN(const Server server, Server::Connect(address, options.timeout_ms));
      const auto s = server.Call<v1::ShardStatus>("DescribeShard", v1::DescribeShardRequest());
      answered = answered || s.ok();
      if (!s.ok()) silent = s.status();
      const std::string error(s.status().message());
      absl::StrAppend(&json, json.empty() ? "" : ",", "{\"server\":", Quoted(address),
                      s.ok() ? ",\"status\":" + ToJson(*s) : ",\"error\":" + Quoted(error), "}");
      if (options.json) continue;
      if (!s.ok()) {
        out << absl::StrFormat("%-28s NO ANSWER: %s\n", address, error);
        continue;
      }
      out << absl::StrFormat("%-28s %-8s %-14s %7d s %5d %12s %12s %11s %s\n", address, s->version(), s->backend(),
                             s->uptime_s(), s->jobs(), HumanBytes(static_cast<double>(s->memory_bytes())),
                             HumanBytes(static_cast<double>(s->memory_limit_bytes())),
                             absl::StrFormat("%d.%d", s->server_epoch() >> 32, s->server_epoch() & UINT32_MAX),
                             StateOf(*s));
    }
    if (!answered && failed.ok()) failed = silent;
  }
  if (options.json) out << "[" << json << "]\n";
  return failed;
}

absl::Status Promote(const Options& options, std::ostream& out) {
  GW_ASSIGN_OR_RETURN(const Server server, Server::Connect(options.address, options.timeout_ms));
  v1::PromoteRequest request;
  request.set_force(options.force);
  GW_ASSIGN_OR_RETURN(const v1::PromoteReply reply, server.Call<v1::PromoteReply>("Promote", request));
  if (options.json) {
    out << absl::StrFormat("{\"server\":%s,\"server_epoch\":\"%d\"}\n", Quoted(options.address), reply.server_epoch());
  } else {
    out << absl::StrFormat("%s serves, epoch %d.%d\n", options.address, reply.server_epoch() >> 32,
                           reply.server_epoch() & UINT32_MAX);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::JobSpec> ReadSpec(const std::string& path) {
  v1::JobSpec spec;
  GW_RETURN_IF_ERROR(ReadMessageFile(path, &spec));
  return spec;
}

absl::Status RunCommand(const Options& options, std::ostream& out) {
  switch (options.command) {
    case Command::kJobCreate:
      return CreateJob(options, out);
    case Command::kJobDescribe: {
      v1::DescribeJobRequest request;
      request.set_job(options.job);
      request.set_digest(options.digest);
      return AskAll<v1::JobStatus>(options, "DescribeJob", request, out, "",
                                   [&out](const std::string& a, const v1::JobStatus& job) { PrintJob(a, job, out); });
    }
    case Command::kJobList:
      return ListJobs(options, out);
    case Command::kJobPrune:
      return PruneJobs(options, out);
    case Command::kJobDelete:
      return DeleteJob(options, out);
    case Command::kSnapshot:
      return TakeSnapshots(options, out);
    case Command::kPromote:
      return Promote(options, out);
    case Command::kTrace:
      return Trace(options, out);
    case Command::kVerify:
      return Verify(options, out);
    case Command::kRestore:
      return Restore(options, out);
    case Command::kShardDescribe:
      return DescribeShards(options, out);
    case Command::kFeatures:
      return ReportFeatures(options.json, out);
    case Command::kLayout: {
      GW_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadSpec(options.spec_path));
      return ReportLayout(spec, options.shards, options.json, out);
    }
    case Command::kCodecExplain:
      return ExplainCodec(options.codec, options.elements, options.json, out);
    case Command::kNone:
      break;
  }
  return absl::InvalidArgumentError("no command: see gradwire --help");
}

std::string HumanBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes) : absl::StrFormat("%.2f %s", bytes, kUnits[unit]);
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      quoted += absl::StrFormat("\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace gradwire::cli
