// Statuses become exceptions of gradwire._errors.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "absl/status/status.h"

namespace gradwire {

// Throws py::error_already_set for a status that is not OK. With the GIL.
inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  const pybind11::object error = pybind11::module_::import("gradwire._errors")
                                     .attr("from_code")(static_cast<int>(status.code()), std::string(status.message()));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw pybind11::error_already_set();
}

}  // namespace gradwire
