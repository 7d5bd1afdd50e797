// Values that one kernel leaves in device memory for the next, so that the host need not wait between them.
#pragma once

#include <cstdint>

#include "kernels/math/math.h"

namespace gradwire::kernels::cuda {

// A number of elements that the host knows, or only an upper bound of it and where the device will find it.
struct ElementCount {
  uint64_t most = 0;
  const uint64_t* device = nullptr;
  GW_HD uint64_t get() const { return device != nullptr ? *device : most; }
};

// A threshold: key and keep_below as in SelectArgs. While it is being found: the bin of the upper histogram in which it
// lies, and how many of that bin's elements are wanted.
struct DeviceSelection {
  uint32_t key;
  uint32_t upper;
  uint64_t keep_below;
  double wanted;  // 0: key and keep_below are final
};

// The runs of a bucket, in device memory: run r covers positions [begin[r], begin[r + 1]), none is empty, and an
// integer in it stands for integer * unit[r], a power of two. Unit 0: the run has no scale yet, its integers are 0.
struct RunScales {
  const uint64_t* begin = nullptr;  // runs + 1, from 0
  const float* unit = nullptr;      // runs
  uint32_t runs = 0;
};

// Index of the run that `position` lies in. Precondition: position < s.begin[s.runs].
GW_HD uint32_t RunOf(const RunScales& s, uint64_t position) {
  uint32_t low = 0, high = s.runs;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (s.begin[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Where a run of a bucket lies in device memory, and what a kernel needs to know of it.
struct RunPlace {
  float* x = nullptr;
  const DeviceSelection* selection = nullptr;  // if not null: replaces key and keep_below
  uint64_t keep_below = 0;                     // this and the next three as in SelectArgs
  uint64_t first_element = 0;
  uint32_t key = 0;
  uint32_t phase = 0;
  uint32_t length = 0;    // > 0
  uint32_t position = 0;  // of its first element in the bucket
  float unit = 0.0f;      // as in RunScales
};

// The runs of a bucket in the order of their positions, which leave no gap. One launch does for all of them: on several
// shards neighbours in a bucket lie apart in the tensor.
struct RunPlaces {
  const RunPlace* at = nullptr;  // in device memory
  uint32_t count = 0;
  uint32_t longest = 0;  // elements of a run at most
};

}  // namespace gradwire::kernels::cuda
