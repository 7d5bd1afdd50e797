// Process-wide settings for programs that move frames; called once, first, by the main function of daemons and tools.
#pragma once

#include <cstdint>

namespace gradwire::transport {

// Malloc: by default glibc returns large buffers to the kernel when they are freed, and each fresh one costs page
// faults, which is half of the goodput. This keeps freed memory in the process.
// Mutexes: the distribution's Abseil is built with deadlock detection on, which records every lock taken; it is
// switched off.
// Call before threads start.
void TuneMalloc();

// What TuneMalloc keeps is returned when it is much and lies idle; by whom, the daemon decides.
uint64_t FreeHeapBytes();
// Takes the heap's lock for as long as that takes: about a tenth of a second per GiB.
void ReturnFreeMemory();

}  // namespace gradwire::transport
