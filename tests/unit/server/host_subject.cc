// Jobs in host memory.
#include "tests/unit/server/subject.h"

namespace gradwire::testing_support {
namespace {

class HostSubject final : public Subject {
 public:
  void Set(JobEnvironment* environment) override { environment->backend = backend_.get(); }

 private:
  const std::unique_ptr<kernels::Backend> backend_ = std::move(*kernels::MakeBackend("cpu"));
};

}  // namespace

std::unique_ptr<Subject> MakeSubject() { return std::make_unique<HostSubject>(); }

}  // namespace gradwire::testing_support
