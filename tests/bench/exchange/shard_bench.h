// The real path: frames through a gradwire-server process, each leg and the whole exchange, next to raw TCP.
#pragma once

#include <string>

#include "tests/bench/exchange/measure.h"
#include "tests/bench/exchange/peer_process.h"
#include "tests/bench/exchange/raw_tcp.h"
#include "tests/bench/exchange/server_process.h"
#include "tests/bench/lib/report.h"

namespace gradwire::bench {

// What is measured, and what it is measured against.
struct ShardBench {
  int rounds = 0;
  std::string codec;        // only this one, by its name in the table; all if empty
  size_t bucket_bytes = 0;  // only this size; all if 0
  std::string transport;    // that the server listens on
  ServerProcess* server = nullptr;
  RawTcpClient* raw = nullptr;
  PeerProcess* raw_peer = nullptr;
  Report* report = nullptr;
  bool Wants(const std::string& name, size_t bytes) const {
    return (codec.empty() || codec == name) && (bucket_bytes == 0 || bucket_bytes == bytes);
  }
};

// Push into the accumulator, pull of the update and of the parameters: every codec and size. Goodput counts frame
// bytes, headers and all; raw TCP moves the same number of bytes.
void BenchLegs(const ShardBench& bench);
// Session::Exchange: encode, push, merge, finish, apply on the shard, pull, apply on the worker. Counts the bytes of
// the float32 gradient; raw TCP moves the gradient there and back.
void BenchExchange(const ShardBench& bench);
// Session::Exchange of 1 KiB, p50.
void BenchStep(const ShardBench& bench);

}  // namespace gradwire::bench
