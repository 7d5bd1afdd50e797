// The Walsh-Hadamard transform, not normalised.
#pragma once

#include <cstddef>

namespace gradwire::homomorphic {

// Replaces x[0 .. d) by H x, H[i][j] = -1 to the number of bits that i and j share; H is its own inverse but for a
// factor of d. d: a power of two. Every addition is rounded, in an order that depends on d alone; integers whose sums
// stay below 2^24 give exact results.
void Hadamard(float* x, size_t d);

}  // namespace gradwire::homomorphic
