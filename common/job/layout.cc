// Cutting tensors into runs, dealing runs to shards, and grouping tensors into buckets.
#include "common/job/layout.h"

#include <algorithm>
#include <bit>
#include <map>

#include "absl/strings/str_format.h"
#include "common/base/hash.h"

namespace gradwire {
namespace {

constexpr uint32_t kMaxShards = 4096;

// Buckets in backward order. A bucket has one codec; tensors of another codec between them go to that codec's open
// bucket, so a small norm does not break the bucket of the large layers around it. Buckets are numbered in the order
// in which backward completes them. A tensor that is kept whole may overfill one.
std::vector<std::vector<BucketPart>> MakeBuckets(const Job& job) {
  const uint64_t run = job.spec().run_elements();
  const uint64_t capacity = std::max<uint64_t>(run, job.spec().bucket_bytes() / 4 / run * run);
  struct Open {
    std::vector<BucketPart> parts;
    uint64_t elements = 0;
  };
  std::vector<Open> open(job.codecs().size());
  std::vector<std::vector<BucketPart>> buckets;
  const auto close = [&buckets](Open& bucket) {
    if (!bucket.parts.empty()) buckets.push_back(std::move(bucket.parts));
    bucket = Open{};
  };
  for (uint32_t t = static_cast<uint32_t>(job.tensors().size()); t-- > 0;) {
    const Tensor& tensor = job.tensors()[t];
    Open& bucket = open[tensor.codec];
    // A tensor that would overfill a bucket starts its own, so that small ones stay whole.
    if (bucket.elements != 0 && bucket.elements + tensor.elements > capacity) close(bucket);
    const bool whole = job.keeps_whole(tensor.codec);
    for (uint64_t begin = 0; begin < tensor.elements;) {
      const uint64_t room = whole ? tensor.elements : capacity - std::min(capacity, bucket.elements);
      const uint64_t end = std::min(tensor.elements, begin + room);
      bucket.parts.push_back({t, begin, end});
      bucket.elements += end - begin;
      begin = end;
      if (bucket.elements >= capacity) close(bucket);
    }
  }
  for (Open& bucket : open) close(bucket);
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const auto& a, const auto& b) { return a.back().tensor > b.back().tensor; });
  return buckets;
}

// Deals runs to shards: in each turn the emptiest shard takes the run, ties are broken by a hash of the run, so the
// loads differ by at most one run and neighbours are spread pseudo-randomly. A tensor that is kept whole is dealt as
// one. Takes a time that hardly grows with the number of shards: a spec of a few bytes may ask for millions of runs on
// thousands of them.
class Dealer {
 public:
  Dealer(uint32_t shards, uint64_t seed) : seed_(seed), emptiest_((shards + 63) / 64) {
    for (uint32_t s = 0; s < shards; ++s) Insert(s);
  }

  uint32_t Deal(uint32_t tensor, uint64_t offset, uint32_t length) {
    if (candidates_ == 0) {
      const auto next = others_.begin();
      least_ = next->first;
      for (const uint32_t shard : next->second) Insert(shard);
      others_.erase(next);
    }
    const uint64_t hash = HashCombine(HashCombine(seed_, tensor), offset);
    const uint32_t shard = Take(static_cast<uint32_t>(hash % candidates_));
    if (length == 0) {
      Insert(shard);
    } else {
      others_[least_ + length].push_back(shard);
    }
    return shard;
  }

 private:
  void Insert(uint32_t shard) {
    emptiest_[shard / 64] |= uint64_t{1} << (shard % 64);
    ++candidates_;
  }
  // The one of the emptiest shards that has `before` of them before it.
  uint32_t Take(uint32_t before) {
    uint32_t word = 0;
    for (; before >= static_cast<uint32_t>(std::popcount(emptiest_[word])); ++word) {
      before -= static_cast<uint32_t>(std::popcount(emptiest_[word]));
    }
    uint64_t left = emptiest_[word];
    for (; before > 0; --before) left &= left - 1;
    const uint64_t bit = left & -left;
    emptiest_[word] &= ~bit;
    --candidates_;
    return word * 64 + static_cast<uint32_t>(std::countr_zero(bit));
  }

  const uint64_t seed_;
  uint64_t least_ = 0;                                // the load of the emptiest shards
  uint32_t candidates_ = 0;                           // how many they are
  std::vector<uint64_t> emptiest_;                    // bit by bit
  std::map<uint64_t, std::vector<uint32_t>> others_;  // by load
};

uint32_t ShapeDigest(const Job& job, const BucketLayout& layout, uint32_t shard_count) {
  uint64_t h = HashString(AgreedOf(job.codecs()[layout.codec]), job.spec().seed());
  if (const auto& update = job.update_codecs()[layout.codec]) h = HashString(ToString(*update), h);
  h = HashCombine(h, (uint64_t{job.spec().max_workers()} << 32) | shard_count);
  h = HashCombine(h, (uint64_t{layout.bucket} << 32) | layout.shard);
  for (const Run& r : layout.runs) h = HashCombine(HashCombine(h, (uint64_t{r.tensor} << 32) | r.length), r.offset);
  return static_cast<uint32_t>(h);
}

}  // namespace

absl::StatusOr<Layout> Layout::Make(const Job& job, uint32_t shard_count) {
  if (shard_count == 0 || shard_count > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a job has 1 to %d shards; %d were asked for", kMaxShards, shard_count));
  }
  Layout layout;
  layout.shard_count_ = shard_count;
  layout.buckets_ = MakeBuckets(job);
  layout.shard_elements_.assign(shard_count, 0);
  layout.slices_.resize(layout.buckets_.size() * shard_count);
  // Short runs are not dealt to even out the loads that long ones left: they would go to few shards, one after the
  // other.
  std::map<uint64_t, Dealer> dealers;  // by the length of runs; 0: of whole tensors
  uint64_t digest = HashCombine(job.digest(), shard_count);
  for (uint32_t b = 0; b < layout.buckets_.size(); ++b) {
    for (uint32_t s = 0; s < shard_count; ++s) {
      BucketLayout& at = layout.slices_[b * shard_count + s];
      at.bucket = b;
      at.shard = s;
      at.codec = job.tensors()[layout.buckets_[b][0].tensor].codec;
      at.run_begin.push_back(0);
    }
    const uint64_t run_elements = job.run_elements(layout.slices_[b * shard_count].codec);
    const bool whole = job.keeps_whole(layout.slices_[b * shard_count].codec);
    Dealer& dealer = dealers.try_emplace(whole ? 0 : run_elements, shard_count, job.spec().seed()).first->second;
    for (const BucketPart& part : layout.buckets_[b]) {
      const uint64_t dealt = whole ? part.end - part.begin : run_elements;
      uint32_t shard = 0;
      for (uint64_t offset = part.begin; offset < part.end; offset += run_elements) {
        const uint32_t length = static_cast<uint32_t>(std::min(run_elements, part.end - offset));
        if ((offset - part.begin) % dealt == 0) {
          shard = dealer.Deal(part.tensor, offset, static_cast<uint32_t>(std::min(dealt, part.end - offset)));
        }
        BucketLayout& at = layout.slices_[b * shard_count + shard];
        at.runs.push_back({part.tensor, length, offset});
        at.elements += length;
        at.run_begin.push_back(at.elements);
        layout.shard_elements_[shard] += length;
      }
    }
    for (uint32_t s = 0; s < shard_count; ++s) {
      BucketLayout& at = layout.slices_[b * shard_count + s];
      at.shape_digest = ShapeDigest(job, at, shard_count);
      digest = HashCombine(digest, at.shape_digest);
    }
  }
  layout.digest_ = digest;
  return layout;
}

}  // namespace gradwire
