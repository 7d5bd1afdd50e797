// See tensor.h.
#include "client/python/src/tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gradwire {

namespace py = pybind11;

BorrowedTensor::BorrowedTensor(const py::object& array, const DlDevice* device, const std::string& what,
                               bool writable) {
  if (PyCapsule_CheckExact(array.ptr())) {
    if (device == nullptr) throw py::type_error(what + " lies on a device, the tensors of this session in host memory");
    TakeCapsule(array.ptr(), *device, what);
  } else {
    if (device != nullptr) throw py::type_error(what + " lies in host memory, the tensors of this session on a device");
    TakeArray(array, what, writable);
  }
}

void BorrowedTensor::TakeCapsule(PyObject* capsule, const DlDevice& device, const std::string& what) {
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  if (PyCapsule_SetName(capsule, "used_dltensor") != 0) throw py::error_already_set();
  managed_.reset(managed);
  const DlTensor& tensor = managed->tensor;
  if (tensor.device != device)
    throw py::type_error(absl::StrCat(what, " lies on a device of DLPack type ", tensor.device.type, ", number ",
                                      tensor.device.index, "; the tensors of this session on type ", device.type,
                                      ", number ", device.index));
  if (tensor.type_code != 2 || tensor.type_bits != 32 || tensor.type_lanes != 1)
    throw py::type_error(what + " must be float32");
  uint64_t elements = 1;
  bool contiguous = true;
  for (int d = tensor.dimensions; d-- > 0;) {
    const auto extent = static_cast<uint64_t>(tensor.shape[d]);
    if (tensor.strides != nullptr && extent > 1 && tensor.strides[d] != static_cast<int64_t>(elements))
      contiguous = false;
    shape_.insert(shape_.begin(), extent);
    elements *= extent;
  }
  if (!contiguous && elements > 0) throw py::value_error(what + " must be C-contiguous");
  values_ = {reinterpret_cast<float*>(static_cast<uint8_t*>(tensor.data) + tensor.byte_offset), elements};
}

void BorrowedTensor::TakeArray(const py::object& object, const std::string& what, bool writable) {
  if (!py::isinstance<py::array>(object))
    throw py::type_error(absl::StrCat(what, " must be an array, not ", std::string(py::str(py::type::of(object)))));
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (!py::isinstance<py::array_t<float>>(array))
    throw py::type_error(absl::StrCat(what, " must be float32, not ", std::string(py::str(array.dtype()))));
  if (!(array.flags() & py::array::c_style)) throw py::value_error(what + " must be C-contiguous");
  if (writable && !array.writeable())
    throw py::value_error(what + " must be writable: the session updates it in place");
  values_ = {const_cast<float*>(static_cast<const float*>(array.data())), static_cast<size_t>(array.size())};
  shape_.assign(array.shape(), array.shape() + array.ndim());
  array_ = object;
}

GivenRows::GivenRows(const py::object& rows, const py::object& values, const std::string& what,
                     std::span<const uint64_t> shape) {
  if (!py::isinstance<py::array_t<int64_t>>(rows))
    throw py::type_error(absl::StrCat("the rows of ", what, " must be an array of int64"));
  const auto indices = py::reinterpret_borrow<py::array>(rows);
  if (indices.ndim() != 1 || !(indices.flags() & py::array::c_style))
    throw py::value_error(absl::StrCat("the rows of ", what, " must be C-contiguous, of one dimension"));
  values_.emplace(values, nullptr, what, false);
  std::vector<uint64_t> wanted(shape.begin(), shape.end());
  if (wanted.empty()) throw py::value_error(what + " has no rows: the tensor has no dimension");
  wanted[0] = static_cast<uint64_t>(indices.size());
  if (values_->shape() != wanted)
    throw py::value_error(absl::StrCat(what, " has values of shape [", absl::StrJoin(values_->shape(), ", "), "] for ",
                                       wanted[0], " rows, where [", absl::StrJoin(wanted, ", "), "] is expected"));
  indices_ = {static_cast<const int64_t*>(indices.data()), static_cast<size_t>(indices.size())};
  rows_ = rows;
}

}  // namespace gradwire
