// What codecs do unless they know better; see codec.h.
#include "common/codec/codec.h"

#include "common/base/hash.h"

namespace gradwire {

uint32_t RoundPlan::Digest() const {
  uint64_t h = HashCombine(sketch_groups, cells_per_group);
  h = HashString({reinterpret_cast<const char*>(exponents.data()), exponents.size()}, h);
  if (!factors.empty()) h = HashString({reinterpret_cast<const char*>(factors.data()), 4 * factors.size()}, h);
  return static_cast<uint32_t>(h);
}

absl::StatusOr<EncodedFrame> Encoder::EncodeElements(const FrameIdentity&, const RoundPlan&, Elements) {
  return absl::UnimplementedError("this codec does not take elements alone");
}

absl::StatusOr<Elements> Codec::Carried(const EncodedFrame&) const {
  return absl::UnimplementedError("this codec does not take elements alone");
}

DeviceNeeds Codec::device_needs() const {
  DeviceNeeds needs;
  needs.host_bytes = 2 * accumulator_bytes();
  needs.means = true;
  return needs;
}

absl::StatusOr<std::unique_ptr<Accumulator>> Codec::NewDeviceAccumulator(kernels::cuda::DeviceBucket*) const {
  return NewAccumulator();
}

absl::StatusOr<std::unique_ptr<Encoder>> Codec::NewDeviceEncoder(kernels::cuda::DeviceBucket*) const {
  return absl::UnimplementedError("this codec has no encoder for the memory of a device");
}

}  // namespace gradwire
