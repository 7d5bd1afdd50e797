// Memory bounds of a job; see memory.h.
#include "server/job/memory.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "absl/strings/str_format.h"
#include "common/codec/plan/plan_window.h"
#include "common/job/norms.h"
#include "common/job/update_codec.h"
#include "server/job/by_rounds.h"
#include "server/job/job_arrays.h"

namespace gradwire {
namespace {

constexpr uint64_t kFrameOverheadBytes = 4096;  // headers, learning rates, exponents of small buckets
constexpr uint64_t kPlanBytes = 8;              // of a run, in frames that carry nothing else: more than any codec's
// A worker that joins is still being sent the version that it starts from when the others pull the next one.
constexpr uint64_t kSerializedVersions = 2;

// Update frames that wait for the disk: of this many rounds, as long as they take less than that.
constexpr uint64_t kJournalRounds = 32;
constexpr uint64_t kMaxJournalBytes = 256u << 20;

uint64_t DenseBound(uint64_t elements) { return elements * 5; }  // float32, or an index and a packed value per element

uint64_t UpdateBound(const Codec& codec, uint64_t elements) {
  const uint64_t dense = DenseBound(elements);
  if (!codec.sparse()) return dense + kFrameOverheadBytes;
  const uint64_t sums_and_bitmap = codec.accumulator_bytes() + elements / 8;
  return std::min<uint64_t>(dense, sums_and_bitmap) + kFrameOverheadBytes;
}

// Of unsigned numbers; the largest one where the result does not fit.
uint64_t Add(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<uint64_t>::max() : sum;
}
uint64_t Multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<uint64_t>::max() : product;
}

struct LayoutSize {
  uint64_t runs = 0;
  uint64_t buckets = 0;
  uint64_t bytes = 0;
};

// Counts as Layout::Make cuts, without cutting.
LayoutSize EstimateLayout(const Job& job, uint32_t shard_count) {
  constexpr uint64_t kHeapBlockBytes = 32;  // run_begin of a bucket without runs
  LayoutSize size;
  std::vector<uint64_t> open(job.codecs().size());  // elements in the open bucket of each codec
  for (size_t t = job.tensors().size(); t-- > 0;) {
    const Tensor& tensor = job.tensors()[t];
    const uint64_t cut = job.run_elements(tensor.codec), capacity = job.bucket_elements(tensor.codec);
    size.runs = Add(size.runs, tensor.elements / cut + (tensor.elements % cut != 0));
    uint64_t& bucket = open[tensor.codec];
    if (bucket != 0 && Add(bucket, tensor.elements) > capacity) {
      ++size.buckets;
      bucket = 0;
    }
    bucket = Add(bucket, tensor.elements);
    size.buckets = Add(size.buckets, bucket / capacity);
    bucket %= capacity;
  }
  for (uint64_t bucket : open) size.buckets = Add(size.buckets, bucket != 0);
  const uint64_t per_bucket =
      Add(Multiply(shard_count, sizeof(BucketLayout) + sizeof(uint32_t) + kHeapBlockBytes), sizeof(BucketPart));
  size.bytes = Add(Multiply(size.runs, sizeof(Run) + sizeof(uint64_t)), Multiply(size.buckets, per_bucket));
  return size;
}

}  // namespace

uint64_t LayoutBytes(const Job& job, uint32_t shard_count) { return EstimateLayout(job, shard_count).bytes; }

uint64_t MaxUploadBytes(uint64_t elements) {
  constexpr uint64_t kOfHeaders = 64;  // headers of chunks and segments are less than one in so many bytes
  return elements * sizeof(float) + elements * sizeof(float) / kOfHeaders + 2 * kFrameOverheadBytes;
}

uint32_t OpenRounds(const Job& job) { return RoundNeedsOf(job).open; }
uint32_t RetainedUpdates(const Job& job) { return 1 + OpenRounds(job); }
uint32_t OwedUpdates(const Job& job) { return 3 + OpenRounds(job); }
uint32_t MaxWaitersPerMember(const Job& job) { return 4 * OpenRounds(job); }

std::string MemoryBound::ToString() const {
  return absl::StrFormat(
      "%d bytes (parameters %d, moments %d, residuals %d, accumulators %d, retained updates %d, serialized parameters "
      "%d, snapshot "
      "%d, journal %d, shard map %d, histories of workers %d, frames in flight %d)%s",
      total(), parameters, moments, residuals, accumulators, updates, serialized, snapshot, journal, layout, histories,
      in_flight, device == 0 ? "" : absl::StrFormat(" and %d bytes of device memory", device));
}

MemoryBound BoundMemory(const Job& job, const Layout& layout, uint32_t shard,
                        const std::vector<std::unique_ptr<Codec>>& codecs, uint64_t frame_limit_bytes, bool on_device) {
  MemoryBound bound;
  uint64_t largest_frame = 0;
  uint64_t round_updates = 0;
  const RoundNeeds rounds = RoundNeedsOf(job);
  const uint64_t serialized_versions = kSerializedVersions + rounds.waiting_versions;
  for (uint32_t b = 0; b < layout.bucket_count(shard); ++b) {
    const uint64_t elements = layout.at(b, shard).elements;
    const Codec* codec = b < codecs.size() ? codecs[b].get() : nullptr;
    const bool two_way = job.update_codecs()[layout.at(b, shard).codec].has_value();
    const uint64_t residual = KeepsUpdateResidual(job, layout.at(b, shard).codec) ? elements * sizeof(float) : 0;
    if (two_way) bound.residuals += elements * sizeof(float) + residual;
    if (on_device) bound.device += DeviceBytes(job, layout.at(b, shard), codec);
    if (job.keeps_parameters()) {
      if (!on_device) {
        bound.parameters += elements * sizeof(float);
        bound.moments += elements * sizeof(float) * static_cast<uint64_t>(job.moments());
      }
      const uint64_t state = elements * sizeof(float) * static_cast<uint64_t>(1 + job.moments());
      bound.serialized += serialized_versions * (rounds.pulls_updates ? state : elements * sizeof(float));
      if (job.durable()) bound.snapshot += state;
    }
    if (job.durable()) bound.snapshot += residual;
    bound.serialized += serialized_versions * kFrameOverheadBytes;
    bound.accumulators += rounds.plans * (layout.at(b, shard).runs.size() + sizeof(RoundPlan));
    if (codec != nullptr) {
      const DeviceNeeds needs = codec->device_needs();
      bound.accumulators +=
          on_device ? needs.host_bytes + needs.pinned_bytes : (1 + OpenRounds(job)) * codec->accumulator_bytes();
      const uint64_t mean = UpdateBound(*codec, elements);
      const uint64_t update = two_way ? DenseBound(elements) + kFrameOverheadBytes : mean;
      // Decoded, encoded and written anew, one after the other.
      if (two_way) bound.accumulators += 3 * DenseBound(elements);
      const uint64_t plan = layout.at(b, shard).runs.size() * kPlanBytes + kFrameOverheadBytes;
      const uint64_t owed = codec->defers() ? update : SkipsNonFinite(job) ? plan : 0;
      if (rounds.pulls_updates) bound.updates += RetainedUpdates(job) * update + OwedUpdates(job) * owed;
      round_updates += two_way ? update + mean : update;
    }
    largest_frame = std::max(largest_frame, elements * 5 + kFrameOverheadBytes);
  }
  if (!NormPhases(job).empty()) {
    const size_t norms = NormsOf(job).size();
    bound.updates += 2 * round_updates;  // the round that is held, and what is decoded of it
    // Where all runs lie; the squares of those here, and of all as others tell them, in the rounds that are kept.
    uint64_t runs = 0;
    for (const BucketLayout& slice : layout.slices()) runs += slice.runs.size();
    bound.updates += 2 * runs * sizeof(uint64_t) + runs * norms * sizeof(double) * (3 + OpenRounds(job));
  }
  bound.layout = LayoutBytes(job, layout.shard_count());
  bound.histories = PushHistory::MaxBytes(layout.bucket_count(shard), rounds.frames_known, job.spec().max_workers());
  const v1::DurabilitySpec& durability = job.spec().durability();
  if (durability.level() == v1::DURABILITY_INTERVAL || durability.on_failure() == v1::DISK_FAILURE_CONTINUE) {
    bound.journal = std::min(kMaxJournalBytes, Multiply(kJournalRounds, round_updates));
  }
  bound.in_flight = rounds.frames_in_flight * std::min(largest_frame, frame_limit_bytes);
  return bound;
}

uint64_t MaxUnsentBytes(const Job& job, const Layout& layout, uint32_t shard,
                        const std::vector<std::unique_ptr<Codec>>& codecs) {
  uint64_t round = 0;
  for (uint32_t b = 0; b < layout.bucket_count(shard); ++b) {
    const uint64_t elements = layout.at(b, shard).elements;
    const uint64_t values = job.keeps_parameters() ? 1 + static_cast<uint64_t>(job.moments()) : 0;
    round += elements * sizeof(float) * values + kFrameOverheadBytes;
    if (!RoundNeedsOf(job).pulls_updates) continue;
    // As it is compressed it may be longer than as it is.
    round += std::max(UpdateBound(*codecs[b], elements), DenseBound(elements) + kFrameOverheadBytes);
  }
  return 2 * (2 + OpenRounds(job)) * round;
}

absl::Status CheckMemoryBeforeLayout(const Job& job, uint32_t shard, uint32_t shard_count, const ArraysLimit& arrays,
                                     uint64_t limit_bytes) {
  if (shard_count == 0) return absl::OkStatus();  // Layout::Make refuses it
  // The loads of shards differ by at most one run of each length, by the largest tensor that is kept whole, and by a
  // piece of slice_bytes and its smaller ones.
  std::set<uint64_t> runs;
  for (const Tensor& tensor : job.tensors()) {
    runs.insert(job.keeps_whole(tensor.codec) ? tensor.elements : job.run_elements(tensor.codec));
  }
  const uint64_t mean = job.elements() / shard_count;
  const uint64_t pieces = 2 * runs.size() * (job.spec().slice_bytes() / sizeof(float));
  const uint64_t least = mean - std::min(mean, std::accumulate(runs.begin(), runs.end(), pieces));
  const uint64_t bytes = Multiply(least, sizeof(float) * static_cast<uint64_t>(1 + job.moments()));
  if (job.keeps_parameters() && bytes > arrays.bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s': parameters and moments of shard %d of %d take at least %d bytes; the limit per job "
                        "is %d: use more shards or raise %s",
                        job.spec().name(), shard, shard_count, bytes, arrays.bytes, std::string(arrays.flag)));
  }
  const LayoutSize size = EstimateLayout(job, shard_count);
  const uint64_t limit = std::min(limit_bytes, kLayoutLimitBytes);
  if (size.bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "job '%s': the shard map of %d elements (%d runs, %d buckets, %d shards) takes about %d bytes; the "
      "limit is %d (the limit per job is %d, that of a shard map %d): raise run_elements or "
      "bucket_bytes, or use fewer shards",
      job.spec().name(), job.elements(), size.runs, size.buckets, shard_count, size.bytes, limit, limit_bytes,
      kLayoutLimitBytes));
}

}  // namespace gradwire
