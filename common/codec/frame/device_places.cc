// See device_places.h.
#include "common/codec/frame/device_places.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/codec/codec.h"
#include "kernels/math/math.h"

namespace gradwire {

using kernels::cuda::RoundMemory;
using kernels::cuda::RunPlace;

float UnitOf(int8_t exponent) { return exponent == kUncalibrated ? 0.0f : kernels::PowerOfTwo(exponent); }

absl::StatusOr<DevicePlaces> DevicePlaces::Make(const BucketLayout& layout, kernels::cuda::DeviceBucket* bucket,
                                                absl::FunctionRef<void(size_t run, RunPlace* place)> fill) {
  std::vector<RunPlace> places(layout.runs.size());
  uint32_t longest = 0;
  for (size_t r = 0; r < places.size(); ++r) {
    fill(r, &places[r]);
    places[r].length = layout.runs[r].length;
    places[r].position = static_cast<uint32_t>(layout.run_begin[r]);
    longest = std::max(longest, places[r].length);
  }
  const size_t bytes = places.size() * sizeof(RunPlace);
  GW_ASSIGN_OR_RETURN(RoundMemory memory, RoundMemory::Make(bucket, bytes));
  bucket->Upload(memory.data(), places.data(), bytes);
  const auto* at = reinterpret_cast<const RunPlace*>(memory.data());
  return DevicePlaces(std::move(memory), {at, static_cast<uint32_t>(places.size()), longest});
}

}  // namespace gradwire
