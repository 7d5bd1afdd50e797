// What the tests of jobs run on: host memory (host_subject.cc) or a device (device_subject.cc). Both link the same
// tests.
#pragma once

#include <memory>

#include "server/job/job_shard.h"

namespace gradwire::testing_support {

// Owns the backend. Outlives the jobs.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual void Set(JobEnvironment* environment) = 0;
};

std::unique_ptr<Subject> MakeSubject();

}  // namespace gradwire::testing_support
