// From bitmaps, or cells that are not 0, to indices.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::kernels {

// Entries behind the last one that IndicesOf and TakeNonzero may write.
inline constexpr size_t kIndexRoom = 48;

// Writes first + the numbers of the one bits of `count` words, ascending, and returns how many there are. By the best
// instructions of the machine it runs on.
size_t IndicesOf(const uint64_t* words, size_t count, uint32_t first, uint32_t* out);

// The same bit by bit: IndicesOf where there is nothing better.
size_t IndicesByBit(const uint64_t* words, size_t count, uint32_t first, uint32_t* out);

// The bits that are one in any of `planes` bitmaps, each `words` long, one behind the other. Writes the bitmap of the
// union to `any` and returns how many bits it has.
size_t UnionOf(const uint64_t* planes, size_t plane_count, size_t words, uint64_t* any);

// Moves what is not 0 out of 64 cells, which are 0 then: writes first + the number of each, ascending, and what it held
// as a signed integer, and returns how many these are.
size_t TakeNonzero(uint8_t* cells, uint32_t first, uint32_t* numbers, int32_t* values);
size_t TakeNonzero(uint16_t* cells, uint32_t first, uint32_t* numbers, int32_t* values);
size_t TakeNonzero(uint32_t* cells, uint32_t first, uint32_t* numbers, int32_t* values);

// The same cell by cell: where there is nothing better.
size_t TakeNonzeroByCell(uint8_t* cells, uint32_t first, uint32_t* numbers, int32_t* values);

}  // namespace gradwire::kernels
