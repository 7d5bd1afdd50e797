// What the agreement tests run on: the CUDA kernels on the host layer (tests/gpu/host) or on a GPU (tests/gpu/device).
// Both link the same tests.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

// Owns what the backend needs.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual AsyncBackend& backend() = 0;
};

struct NamedSubject {
  std::string name;
  std::function<std::unique_ptr<Subject>()> make;
};
inline void PrintTo(const NamedSubject& subject, std::ostream* out) { *out << subject.name; }

std::vector<NamedSubject> Subjects();

}  // namespace gradwire::kernels::cuda
