// The configuration of gradwire-server: one validated struct, read in one place from flags and a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradwire {

struct ServerConfig {
  std::vector<std::string> listen = {"grpc://127.0.0.1:7070"};  // this machine alone, unless told
  uint64_t memory_limit_bytes = 0;                              // of all jobs; 0: 70 % of this machine's memory
  uint64_t job_memory_limit_bytes = 0;                          // of one job; 0: memory_limit_bytes
  uint64_t device_memory_limit_bytes = 0;        // of all jobs, with backend cuda; 0: 80 % of what the GPU has left
  uint64_t frame_limit_bytes = 1ull << 30;       // 64 KiB to 4 GiB
  uint32_t drain_ms = 5000;                      // 0 to 600000
  std::string backend = "auto";                  // auto, cpu, cuda
  std::string log_level = "info";                // debug, info, warning, error
  uint32_t max_jobs = 64;                        // 1 to 4096
  uint32_t spin_us = 100;                        // 0 to 10000; transport::Limits.spin_us
  uint64_t snapshot_journal_bytes = 1ull << 30;  // 1 MiB and more
  std::string data_dir;                          // where durable jobs are kept; empty: there can be none
  std::string follow;                            // address of the primary; empty: this server is none's standby
  uint32_t follower_timeout_ms = 5000;           // 100 to 600000
  std::string lease;                             // proto/REPLICATION.md, "Leases"; empty: `follow` and operators decide
  uint32_t lease_ttl_ms = 10'000;                // 1000 to 600000
  std::string name;                              // of this server, to standbys; empty: host and addresses
  uint64_t unused_job_ms = 3'600'000;            // jobs of durability none without workers end after it; 0: never
  uint32_t max_standbys = 4;                     // 0 to 64; each has a thread
  uint64_t standby_queue_bytes = 256ull << 20;   // 1 MiB and more; of all standbys together
  uint32_t max_connections = 0;                  // per address; 0: as many as descriptors allow, at most 16384
  uint32_t max_handshakes = 1024;                // 1 to 65536; per address
  uint32_t max_streams = 8192;                   // 1 to 1048576; per address
  // 16 MiB and more; messages that have come in part, per address; 0: one of a worker's for each of max_streams, 512
  // MiB at least, a quarter of memory at most.
  uint64_t receive_limit_bytes = 0;
  std::string metrics_listen;  // HOST:PORT of the page for Prometheus; empty: there is none
  std::string port_file;       // where to write the bound addresses, one per line; empty: nowhere

  // No flag. Who dials one of the bound addresses in this process reaches the server past the network.
  bool serves_own_process = false;

  // Fills in what depends on the machine and checks every range. InvalidArgument names the knob, the value found and
  // the values allowed.
  absl::Status Validate();
};

// Lets the process have as many descriptors as its hard limit says; before Validate.
void RaiseDescriptorLimit();

// Overlays a file with a gradwire.v1.ServerConfig (proto/gradwire/v1/server_config.proto), YAML or protobuf text
// format. Errors: those of ReadMessageFile.
absl::Status ApplyConfigFile(const std::string& path, ServerConfig* config);

struct ParsedFlags {
  ServerConfig config;
  bool exit = false;  // --help or --version was asked for, or the flags are wrong: exit with `exit_code`
  int exit_code = 0;
};

// Parses flags and the file of --config; flags win over the file. Prints help and usage errors itself; errors of the
// file come back as a status.
absl::StatusOr<ParsedFlags> ParseFlags(int argc, const char* const* argv);

}  // namespace gradwire
