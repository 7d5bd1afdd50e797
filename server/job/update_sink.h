// Where update frames go before anyone may see them: the place of the journal.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "common/base/bytes.h"

namespace gradwire {

// Thread-safe. Buckets of one round may be appended concurrently; the rounds of one bucket come in order.
class UpdateSink {
 public:
  virtual ~UpdateSink() = default;
  // Returns when the record meets the job's durability. Called without locks held. An error is reported and the round
  // goes on: what a job wants instead is decided by its durability policy.
  virtual absl::Status Append(const std::string& job, uint32_t bucket, uint64_t round,
                              std::span<const Bytes> chunks) = 0;
};

}  // namespace gradwire
