// The memory that this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace gradwire {

// What the machine has, or the least that a control group allows of those that this process is in (a container's limit:
// memory.max of cgroup v2, memory.limit_in_bytes of v1). `root`: where /proc and /sys are looked for, for tests.
uint64_t UsableMemoryBytes(const std::string& root = "");
uint64_t MachineMemoryBytes();

}  // namespace gradwire
