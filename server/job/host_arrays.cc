// Arrays in host memory; see job_arrays.h.
#include "server/job/job_arrays.h"

namespace gradwire {
namespace {

class HostArrays final : public JobArrays {
 public:
  HostArrays(const Job* job, const Layout* layout, uint32_t shard, kernels::Backend* backend)
      : job_(*job), layout_(*layout), shard_(shard), backend_(*backend) {}

  absl::StatusOr<std::unique_ptr<Accumulator>> NewAccumulator(uint32_t, const Codec& codec) override {
    return codec.NewAccumulator();
  }
  absl::StatusOr<std::unique_ptr<ParameterStore>> NewStore(uint32_t bucket) override {
    return MakeHostStore(&job_, &layout_.at(bucket, shard_), &backend_);
  }

 private:
  const Job& job_;
  const Layout& layout_;
  const uint32_t shard_;
  kernels::Backend& backend_;
};

}  // namespace

std::unique_ptr<JobArrays> MakeHostArrays(const Job* job, const Layout* layout, uint32_t shard,
                                          kernels::Backend* backend) {
  return std::make_unique<HostArrays>(job, layout, shard, backend);
}

}  // namespace gradwire
