// Arrays of a job in the memory of a device, taken as a whole when the job is made; see job_arrays.h.
#include <utility>

#include "common/base/status_macros.h"
#include "server/job/device_store.h"
#include "server/job/job_arrays.h"

namespace gradwire {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;

// Sparse plain steps change only what was sent; everything else goes through the means of a whole bucket.
uint64_t MeansOf(const Job& job, const BucketLayout& layout, const DeviceNeeds& needs) {
  return needs.means || NeedsMeans(job, layout) ? layout.elements : 0;
}

class DeviceArrays final : public JobArrays {
 public:
  DeviceArrays(const Job* job, const Layout* layout, uint32_t shard, kernels::Backend* backend,
               std::unique_ptr<JobMemory> memory)
      : job_(*job), layout_(*layout), shard_(shard), backend_(*backend), memory_(std::move(memory)) {}

  absl::Status MakeBuckets(const std::vector<std::unique_ptr<Codec>>& codecs, kernels::cuda::DeviceShare* share) {
    for (uint32_t b = 0; b < layout_.bucket_count(shard_); ++b) {
      const DeviceNeeds needs = codecs[b]->device_needs();
      GW_ASSIGN_OR_RETURN(
          std::unique_ptr<DeviceBucket> bucket,
          DeviceBucket::Make(share, memory_.get(), MeansOf(job_, layout_.at(b, shard_), needs), needs.pinned_bytes));
      buckets_.push_back(std::move(bucket));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Accumulator>> NewAccumulator(uint32_t bucket, const Codec& codec) override {
    return codec.NewDeviceAccumulator(buckets_[bucket].get());
  }
  absl::StatusOr<std::unique_ptr<ParameterStore>> NewStore(uint32_t bucket) override {
    return MakeDeviceStore(&job_, &layout_.at(bucket, shard_), &backend_, buckets_[bucket].get());
  }

 private:
  const Job& job_;
  const Layout& layout_;
  const uint32_t shard_;
  kernels::Backend& backend_;
  const std::unique_ptr<JobMemory> memory_;
  std::vector<std::unique_ptr<DeviceBucket>> buckets_;  // gone before the memory that they work in
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobArrays>> MakeDeviceArrays(const Job* job, const Layout* layout, uint32_t shard,
                                                            const std::vector<std::unique_ptr<Codec>>& codecs,
                                                            kernels::Backend* backend,
                                                            kernels::cuda::DeviceShare* share, uint64_t device_bytes) {
  GW_ASSIGN_OR_RETURN(std::unique_ptr<JobMemory> memory, share->budget().Admit(device_bytes));
  auto arrays = std::make_unique<DeviceArrays>(job, layout, shard, backend, std::move(memory));
  GW_RETURN_IF_ERROR(arrays->MakeBuckets(codecs, share));
  return arrays;
}

uint64_t DeviceBytes(const Job& job, const BucketLayout& layout, const Codec* codec) {
  const DeviceNeeds needs = codec != nullptr ? codec->device_needs() : DeviceNeeds{};
  return needs.device_bytes + JobMemory::Rounded(MeansOf(job, layout, needs), sizeof(float)) +
         DeviceStoreBytes(job, layout);
}

}  // namespace gradwire
