// The devices that arrays may lie on, by their names in DLPack.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "gradwire/session.h"

namespace gradwire {

// `type`: DLDeviceType. Errors: InvalidArgument for a type that there is nothing for; those of OpenCudaDevice.
absl::StatusOr<std::shared_ptr<Device>> OpenDevice(int type, int index);

}  // namespace gradwire
