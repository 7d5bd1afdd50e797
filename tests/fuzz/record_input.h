// Records of journals as inputs: what must be right in them before a decoder looks further.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/journal/record.h"

namespace gradwire::fuzz {

// The record at the front of `bytes`, at least a record's header, which come from segment `sequence`: its body is as
// long as what is there, its checksums are right. Returns its bytes.
size_t RepairRecord(std::span<uint8_t> bytes, uint64_t sequence);

// Aborts unless the record is the same when it was written and read again.
void RequireRoundTrip(const journal::Record& record);

std::vector<uint8_t> BytesOf(const journal::EncodedRecord& encoded);

}  // namespace gradwire::fuzz
