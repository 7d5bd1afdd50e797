// The flags of gradwire-server and their help text; see config.h.
#include <CLI/CLI.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/config/usage.h"
#include "server/config/config.h"

namespace gradwire {
namespace {

constexpr char kDescription[] =
    "A shard server of Gradwire: owns slices of models and their optimizer state, merges the\n"
    "compressed gradients that workers push, and serves the updates.\n";

constexpr char kFooter[] =
    "\nExample: two shards on this machine\n"
    "  gradwire-server --listen grpc://127.0.0.1:7070 &\n"
    "  gradwire-server --listen grpc://127.0.0.1:7071 &\n"
    "  gradwire shard describe --servers grpc://127.0.0.1:7070,grpc://127.0.0.1:7071\n"
    "\nExample: the same from a file, server.yaml\n"
    "  listen: [\"grpc://0.0.0.0:7070\", \"unix:///run/gradwire.sock\"]\n"
    "  memory_limit_bytes: 8589934592\n"
    "  drain_ms: 10000\n"
    "  log_level: warning\n"
    "and then\n"
    "  gradwire-server --config server.yaml --drain-ms 2000\n"
    "\nSIGTERM or SIGINT stops taking workers, lets the open rounds finish for --drain-ms and exits with 0;\n"
    "a second signal exits at once.\n";

// What the command line said; unset where it said nothing, so that the file's value stays.
struct Given {
  std::vector<std::string> listen;
  std::optional<uint64_t> memory_limit_bytes, job_memory_limit_bytes, device_memory_limit_bytes, frame_limit_bytes,
      snapshot_journal_bytes, unused_job_ms, standby_queue_bytes, receive_limit_bytes;
  std::optional<uint32_t> max_connections, max_handshakes, max_streams;
  std::optional<uint32_t> max_standbys, drain_ms, max_jobs, spin_us, follower_timeout_ms, lease_ttl_ms;
  std::optional<std::string> backend, log_level, data_dir, follow, lease, name, metrics_listen;
  std::string port_file;
  std::string config_path;
};

void Define(CLI::App& app, Given& g) {
  app.footer(kFooter);
  app.set_version_flag("--version", std::string(GRADWIRE_VERSION));
  app.add_option(
      "--config", g.config_path,
      "File of defaults, YAML (.yaml, .yml, .json) or protobuf text format (.textproto, .txtpb, .pbtxt) with the "
      "fields of proto/gradwire/v1/server_config.proto; flags override it");
  app.add_option(
         "--listen", g.listen,
         "Addresses to listen on: grpc://HOST:PORT, tcp://HOST:PORT, unix:///PATH; port 0 takes a free one; "
         "repeatable. "
         "Default grpc://127.0.0.1:7070: for programs of this machine; with 0.0.0.0, for everybody who reaches it")
      ->delimiter(',');
  app.add_option(
      "--memory-limit-bytes", g.memory_limit_bytes,
      "Bytes that all jobs together may take; more is refused when a job is created. Default: 70 % of what the machine "
      "has or the container is limited to");
  app.add_option("--job-memory-limit-bytes", g.job_memory_limit_bytes,
                 "Bytes that one job may take. Default: --memory-limit-bytes");
  app.add_option(
      "--device-memory-limit-bytes", g.device_memory_limit_bytes,
      "Bytes of GPU memory that all jobs together may take, with --backend cuda. Default: 80 % of what it has "
      "left at the start");
  app.add_option("--frame-limit-bytes", g.frame_limit_bytes,
                 "Bytes of one frame, all chunks, 65536 to 4294967296. Default 1073741824");
  app.add_option("--drain-ms", g.drain_ms,
                 "Milliseconds after SIGTERM for the open rounds to finish, 0 to 600000. Default 5000");
  app.add_option("--max-jobs", g.max_jobs, "Jobs at once, 1 to 4096. Default 64");
  app.add_option("--unused-job-ms", g.unused_job_ms,
                 "Milliseconds after which a job of durability none that has no workers ends; 0: it stays until it is\n"
                 "deleted. Default 3600000");
  app.add_option("--spin-us", g.spin_us,
                 "Microseconds to busy-wait for the next message before sleeping, while messages come that fast, 0\n"
                 "(never) to 10000. Default 100");
  app.add_option(
      "--max-connections", g.max_connections,
      "Connections at once, of each address. One more takes the place of the one that has been idle for\n"
      "longest; where all are in use, it is refused. Default: what the limit of descriptors (ulimit -n, which\n"
      "is raised at the start as far as it may be) leaves beside journals, at most 16384");
  app.add_option("--max-handshakes", g.max_handshakes,
                 "Connections of each address that have not said what they want, 1 to 65536. Default 1024");
  app.add_option("--max-streams", g.max_streams,
                 "Open streams of each address (a worker has two), 1 to 1048576; one more is refused. Default 8192");
  app.add_option(
      "--receive-limit-bytes", g.receive_limit_bytes,
      "Bytes that messages which have come in part may take, of each tcp:// address, 16777216 and more. Beyond\n"
      "it the connection whose message began first is closed: of workers that push at once as many as it has\n"
      "261 KiB are served. Default: that for each of --max-streams, 536870912 at least, a quarter of memory at\n"
      "most");
  app.add_option(
      "--data-dir", g.data_dir,
      "Directory for the journals of durable jobs, of this server alone; made if it is missing. A restarted\n"
      "server finds its jobs there. Default: none, durable jobs are refused");
  app.add_option(
      "--follow", g.follow,
      "Address of a shard server whose standby this one is: it keeps a copy of its durable jobs, and serves\n"
      "nobody until `gradwire promote`. Needs --data-dir");
  app.add_option("--follower-timeout-ms", g.follower_timeout_ms,
                 "Milliseconds after which rounds no longer wait for a silent standby, 100 to 600000. Default 5000");
  app.add_option("--max-standbys", g.max_standbys,
                 "Standbys of this server at once, 0 (nobody may follow it) to 64. Default 4");
  app.add_option(
      "--standby-queue-bytes", g.standby_queue_bytes,
      "Bytes of records that may wait to be sent to standbys, of all together; one that does not keep up is\n"
      "ended. 1048576 and more. Default 268435456");
  app.add_option("--lease", g.lease,
                 "Whoever holds it is primary, the other server (--follow) its standby: etcd://HOST:PORT/KEY or\n"
                 "kubernetes://NAMESPACE/NAME (outside of a pod with "
                 "?server=https://HOST:PORT&token-file=PATH&ca-file=PATH), the\n"
                 "same for both. Default: none, `gradwire promote` decides");
  app.add_option(
      "--lease-ttl-ms", g.lease_ttl_ms,
      "Milliseconds without a renewal after which the lease is free, 1000 to 600000; kept in whole seconds.\n"
      "Default 10000");
  app.add_option("--name", g.name,
                 "Of this server, in the status of others; with --lease also what says that it was the last primary,\n"
                 "so give it where host or --listen may change. Default: host and addresses");
  app.add_option(
      "--snapshot-journal-bytes", g.snapshot_journal_bytes,
      "Bytes by which the journal of a job grows before a snapshot is taken and its old part removed, 1048576 "
      "and\nmore. Default 1073741824");
  app.add_option("--backend", g.backend,
                 "Arithmetic on: auto (the best SIMD of this CPU), cpu, cpu:avx512, cpu:avx2, cpu:neon,\nreference, "
                 "cuda (parameters and sums in GPU memory). Default auto");
  app.add_option(
      "--metrics-listen", g.metrics_listen,
      "HOST:PORT on which Prometheus finds the metrics of this server and its jobs (http://HOST:PORT/metrics), for\n"
      "everybody who reaches it. Default: none");
  app.add_option("--log-level", g.log_level, "debug, info, warning, error. Default info");
  app.add_option("--port-file", g.port_file, "File to write the bound addresses to, one per line, once listening");
}

void Overlay(const Given& g, ServerConfig* config) {
  if (!g.listen.empty()) config->listen = g.listen;
  if (g.memory_limit_bytes) config->memory_limit_bytes = *g.memory_limit_bytes;
  if (g.job_memory_limit_bytes) config->job_memory_limit_bytes = *g.job_memory_limit_bytes;
  if (g.device_memory_limit_bytes) config->device_memory_limit_bytes = *g.device_memory_limit_bytes;
  if (g.frame_limit_bytes) config->frame_limit_bytes = *g.frame_limit_bytes;
  if (g.drain_ms) config->drain_ms = *g.drain_ms;
  if (g.max_jobs) config->max_jobs = *g.max_jobs;
  if (g.spin_us) config->spin_us = *g.spin_us;
  if (g.unused_job_ms) config->unused_job_ms = *g.unused_job_ms;
  if (g.max_connections) config->max_connections = *g.max_connections;
  if (g.max_handshakes) config->max_handshakes = *g.max_handshakes;
  if (g.max_streams) config->max_streams = *g.max_streams;
  if (g.receive_limit_bytes) config->receive_limit_bytes = *g.receive_limit_bytes;
  if (g.backend) config->backend = *g.backend;
  if (g.log_level) config->log_level = *g.log_level;
  if (g.snapshot_journal_bytes) config->snapshot_journal_bytes = *g.snapshot_journal_bytes;
  if (g.data_dir) config->data_dir = *g.data_dir;
  if (g.follow) config->follow = *g.follow;
  if (g.follower_timeout_ms) config->follower_timeout_ms = *g.follower_timeout_ms;
  if (g.max_standbys) config->max_standbys = *g.max_standbys;
  if (g.standby_queue_bytes) config->standby_queue_bytes = *g.standby_queue_bytes;
  if (g.lease) config->lease = *g.lease;
  if (g.lease_ttl_ms) config->lease_ttl_ms = *g.lease_ttl_ms;
  if (g.name) config->name = *g.name;
  if (g.metrics_listen) config->metrics_listen = *g.metrics_listen;
  config->port_file = g.port_file;
}

}  // namespace

absl::StatusOr<ParsedFlags> ParseFlags(int argc, const char* const* argv) {
  CLI::App app(kDescription, "gradwire-server");
  Given given;
  Define(app, given);
  ParsedFlags parsed;
  if (const std::optional<int> status = ParseArguments(app, argc, argv)) {
    parsed.exit = true;
    parsed.exit_code = *status;
    return parsed;
  }
  if (!given.config_path.empty()) {
    const absl::Status read = ApplyConfigFile(given.config_path, &parsed.config);
    if (!read.ok()) return absl::Status(read.code(), absl::StrCat("--config: ", std::string(read.message())));
  }
  Overlay(given, &parsed.config);
  GW_RETURN_IF_ERROR(parsed.config.Validate());
  return parsed;
}

}  // namespace gradwire
