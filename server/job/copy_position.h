// How far a standby's copy of a bucket is, in a form that its primary can check. Contract: proto/REPLICATION.md,
// "Going on".
#pragma once

#include <cstdint>

#include "common/journal/record.h"

namespace gradwire {

struct CopyPosition {
  uint64_t version = 0;
  uint64_t digest = 0;  // DigestOf the update that made it
};

// The first 64 bits of the SHA-256 of the record as it stands in a journal with sequence and synced bytes 0, without
// its mean. Reads the whole record. (A CRC-32C would not do: records and frames end with their own, and over both it
// says nothing about the bytes before.)
uint64_t DigestOf(const journal::Record& record);

}  // namespace gradwire
