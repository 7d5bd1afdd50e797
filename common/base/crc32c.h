// CRC-32C (Castagnoli, RFC 3720), the checksum of every segment of a frame and of every journal record.
#pragma once

#include <cstdint>
#include <span>

namespace gradwire {

// Extends `crc` (0 to start) by `data`. Pure. Folds by carry-less multiplication where the CPU has that for
// AVX-512, uses the SSE4.2 instruction where it has that, a table otherwise; all give the same result.
uint32_t Crc32c(std::span<const uint8_t> data, uint32_t crc = 0);

// The same, and copies the data to `out` on the way: one pass over memory instead of two.
uint32_t CopyCrc32c(std::span<const uint8_t> data, uint8_t* out, uint32_t crc = 0);

// What other machines run, for tests: without folding; the table.
uint32_t Crc32cUnfolded(std::span<const uint8_t> data, uint32_t crc = 0);
uint32_t Crc32cPortable(std::span<const uint8_t> data, uint32_t crc = 0);

}  // namespace gradwire
