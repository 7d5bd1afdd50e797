// Arrays of Python as the session borrows them: NumPy arrays in host memory, DLPack capsules on a device.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/session.h"

namespace gradwire {

// The part of DLPack's ABI (version 0.8) that a consumer of "dltensor" capsules needs.
inline constexpr int kDlCuda = 2;
struct DlDevice {
  int32_t type;
  int32_t index;
  bool operator==(const DlDevice&) const = default;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t dimensions;
  uint8_t type_code;  // 2: float
  uint8_t type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides;  // in elements; null: C-contiguous
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

// A float32, C-contiguous array, kept alive. To be made, moved and destroyed with the GIL held.
class BorrowedTensor {
 public:
  // `device`: where the session's tensors lie, or null for host memory. TypeError or ValueError, naming `what`, for an
  // array of another kind or place.
  BorrowedTensor(const pybind11::object& array, const DlDevice* device, const std::string& what, bool writable);

  std::span<float> values() const { return values_; }
  const std::vector<uint64_t>& shape() const { return shape_; }

 private:
  struct Deleter {
    void operator()(DlManagedTensor* managed) const {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
  };
  void TakeCapsule(PyObject* capsule, const DlDevice& device, const std::string& what);
  void TakeArray(const pybind11::object& array, const std::string& what, bool writable);

  pybind11::object array_;                             // in host memory
  std::unique_ptr<DlManagedTensor, Deleter> managed_;  // on a device
  std::span<float> values_;
  std::vector<uint64_t> shape_;
};

// Rows of a gradient: their indices, one int64 each, and their values. In host memory.
class GivenRows {
 public:
  GivenRows() = default;
  // `shape`: of the tensor. TypeError or ValueError, naming `what`.
  GivenRows(const pybind11::object& rows, const pybind11::object& values, const std::string& what,
            std::span<const uint64_t> shape);
  RowGradient gradient() const { return {indices_, values_->values().data()}; }

 private:
  pybind11::object rows_;
  std::span<const int64_t> indices_;
  std::optional<BorrowedTensor> values_;
};

}  // namespace gradwire
