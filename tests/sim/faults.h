// The kinds of faults, as a table: one entry is all that a new kind takes.
#pragma once

#include <span>

#include "tests/sim/coverage.h"
#include "tests/sim/run.h"

namespace gradwire::sim {

struct Fault {
  Event event;
  uint32_t weight;  // how often it is chosen
  // False: it does not apply to this run, or not now.
  bool (*apply)(Run& run);
};

std::span<const Fault> Faults();

}  // namespace gradwire::sim
