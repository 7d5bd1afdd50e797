// See device.h.
#include "client/python/src/device.h"

#include "absl/strings/str_cat.h"
#include "client/python/src/tensor.h"

namespace gradwire {

absl::StatusOr<std::shared_ptr<Device>> OpenDevice(int type, int index) {
  if (type == kDlCuda) return OpenCudaDevice(index);
  return absl::InvalidArgumentError(absl::StrCat("arrays lie on a device of DLPack type ", type,
                                                 "; Gradwire takes arrays in host memory and on CUDA devices"));
}

}  // namespace gradwire
