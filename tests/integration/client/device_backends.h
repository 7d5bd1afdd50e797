// The devices that the tests of jobs on a device run on: the host layer of tests/gpu (queued_backends.cc), or a GPU
// (tests/gpu/device). Both link the same tests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace gradwire::testing {

struct NamedBackend {
  std::string name;
  std::function<std::unique_ptr<kernels::Backend>()> make;
};

// At least one. Each made backend is a device of its own, or shares one.
std::vector<NamedBackend> DeviceBackends();
// Rounds of a job that is compared with the CPU's.
int DeviceRounds();

}  // namespace gradwire::testing
