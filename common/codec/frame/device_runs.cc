// See device_runs.h.
#include "common/codec/frame/device_runs.h"

#include <vector>

#include "common/base/status_macros.h"
#include "common/codec/codec.h"
#include "kernels/math/math.h"

namespace gradwire {

using kernels::cuda::JobMemory;

absl::Status DeviceRuns::Allocate() {
  GW_ASSIGN_OR_RETURN(begin_, bucket_.memory().Take<uint64_t>(layout_.run_begin.size()));
  GW_ASSIGN_OR_RETURN(units_, bucket_.memory().Take<float>(layout_.runs.size()));
  bucket_.Upload(begin_, layout_.run_begin.data(), layout_.run_begin.size() * sizeof(uint64_t));
  return absl::OkStatus();
}

uint64_t DeviceRuns::Bytes(const BucketLayout& layout) {
  return JobMemory::Rounded(layout.run_begin.size(), sizeof(uint64_t)) +
         JobMemory::Rounded(layout.runs.size(), sizeof(float));
}

void DeviceRuns::SetExponents(std::span<const int8_t> exponents) {
  std::vector<float> units;
  units.reserve(exponents.size());
  for (int8_t exponent : exponents) {
    units.push_back(exponent == kUncalibrated ? 0.0f : kernels::PowerOfTwo(exponent));
  }
  bucket_.Upload(units_, units.data(), units.size() * sizeof(float));
}

}  // namespace gradwire
