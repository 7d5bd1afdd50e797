// The lookup table of THC (Li et al., NSDI 2024, sections 4.3 and 5): which 2^bits of the integers from 0 to the
// granularity are best for normal numbers, and how far its range reaches. Computed from + - * / and sqrt alone, so
// every machine finds the same.
#pragma once

#include <cstdint>
#include <vector>

namespace gradwire::homomorphic {

// The t with P(|Z| > t) = p for a standard normal Z. p: in (0, 1).
double NormalRange(double p);

// The table of least expected squared error for a normal Z within [-t, t], t = NormalRange(p), rounded by chance to one
// of its neighbours t * T / h, h = granularity / 2: symmetric, ascending, from -h to h. Preconditions: granularity
// even, at least 2^bits.
std::vector<int8_t> ThcTable(uint32_t bits, uint32_t granularity, double p);

}  // namespace gradwire::homomorphic
