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
    const uint64_t capacity = job.bucket_elements(tensor.codec);
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

// Deals pieces (a run, runs that stay together, a tensor that is kept whole) to shards: in each turn the emptiest shard
// takes the piece, ties are broken by a hash of its first run, so the loads differ by at most one piece and neighbours
// are spread pseudo-randomly. Takes a time that hardly grows with the number of shards: a spec of a few bytes may ask
// for millions of runs on thousands of them.
class Dealer {
 public:
  Dealer(uint32_t shards, uint64_t seed) : seed_(seed), emptiest_((shards + 63) / 64) {
    for (uint32_t s = 0; s < shards; ++s) Insert(s);
  }

  uint32_t Deal(uint32_t tensor, uint64_t offset, uint64_t length) {
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

// What tensors that are dealt to shards in pieces of one size have in common: short runs are not dealt to even out the
// loads that long ones left, for they would go to few shards, one after the other.
struct Kind {
  uint64_t run_elements = 0;
  bool whole = false;  // pieces are tensors
  uint64_t bucket_elements = 0;
  uint64_t slice_of = 1;  // a piece is one of so many of JobSpec.slice_bytes
  auto operator<=>(const Kind&) const = default;
};

// Pieces are smaller where a worker may send most elements of one: where all travel, and of tables, whose frequent rows
// have most of what a sparse codec chooses.
Kind KindOf(const Job& job, const Tensor& tensor) {
  Kind kind{job.run_elements(tensor.codec), job.keeps_whole(tensor.codec), job.bucket_elements(tensor.codec)};
  if (kind.whole || job.spec().slice_bytes() == 0) return kind;
  if (tensor.role == v1::ROLE_EMBEDDING || tensor.role == v1::ROLE_HEAD) kind.slice_of = 16;
  if (AllTravel(job.codecs()[tensor.codec])) kind.slice_of = 64;
  return kind;
}

// Deals the runs of one kind, in backward order.
class PieceDealer {
 public:
  // `slices`: by bucket of the job and shard.
  PieceDealer(const Job& job, const Kind& kind, uint32_t shards, std::vector<BucketLayout>* slices)
      : shards_(shards),
        run_elements_(kind.run_elements),
        whole_(kind.whole),
        slices_(*slices),
        dealer_(shards, job.spec().seed()) {
    // Where a shard's share of a bucket is as large, it has some of every bucket: on a slow link all of them receive at
    // any time.
    const uint64_t most = job.spec().slice_bytes() / sizeof(float);
    if (kind.bucket_elements / shards >= most) return;
    if (kind.slice_of > 1) {
      piece_elements_ = most / kind.slice_of;
      return;
    }
    uint64_t elements = 0;
    for (const Tensor& tensor : job.tensors())
      if (KindOf(job, tensor) == kind) elements += tensor.elements;
    // As large as leaves all shards the same.
    const uint64_t turns = (elements + shards * most - 1) / (shards * most);
    piece_elements_ = (elements + shards * turns - 1) / (shards * turns);
  }

  void Add(uint32_t job_bucket, const BucketPart& part) {
    for (uint64_t begin = part.begin; begin < part.end;) {
      // Whole runs, and one more than would fit.
      const uint64_t room = (std::max(piece_elements_, elements_ + 1) - elements_ + run_elements_ - 1) / run_elements_;
      const uint64_t end = whole_ ? part.end : std::min(part.end, begin + room * run_elements_);
      piece_.push_back({job_bucket, {part.tensor, begin, end}});
      elements_ += end - begin;
      begin = end;
      if (whole_ || elements_ >= piece_elements_) Close();
    }
  }

  // Deals what is left.
  void Close() {
    if (piece_.empty()) return;
    const BucketPart& first = piece_.front().second;
    const uint32_t shard = dealer_.Deal(first.tensor, first.begin, elements_);
    for (const auto& [job_bucket, part] : piece_) {
      std::vector<Run>& runs = slices_[size_t{job_bucket} * shards_ + shard].runs;
      for (uint64_t offset = part.begin; offset < part.end; offset += run_elements_)
        runs.push_back({part.tensor, static_cast<uint32_t>(std::min(run_elements_, part.end - offset)), offset});
    }
    piece_.clear();
    elements_ = 0;
  }

 private:
  const uint32_t shards_;
  const uint64_t run_elements_;
  const bool whole_;
  std::vector<BucketLayout>& slices_;
  Dealer dealer_;
  uint64_t piece_elements_ = 0;                         // a piece is full with so many; 0: with its first run
  std::vector<std::pair<uint32_t, BucketPart>> piece_;  // with their buckets
  uint64_t elements_ = 0;
};

// Tensors of a bucket are in backward order; runs may have been dealt in another one.
void NumberRuns(BucketLayout* slice) {
  const auto before = [](const Run& a, const Run& b) {
    return a.tensor != b.tensor ? a.tensor > b.tensor : a.offset < b.offset;
  };
  if (!std::ranges::is_sorted(slice->runs, before)) std::ranges::sort(slice->runs, before);
  slice->run_begin.reserve(slice->runs.size() + 1);
  slice->run_begin.push_back(0);
  for (const Run& run : slice->runs) slice->run_begin.push_back(slice->elements += run.length);
}

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
  layout.slices_.resize(layout.buckets_.size() * shard_count);
  std::map<Kind, PieceDealer> dealers;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    for (uint32_t s = 0; s < shard_count; ++s) {
      BucketLayout& slice = layout.slices_[size_t{b} * shard_count + s];
      slice.shard = s;
      slice.job_bucket = b;
      slice.codec = job.tensors()[layout.buckets_[b][0].tensor].codec;
    }
    for (const BucketPart& part : layout.buckets_[b]) {
      const Kind kind = KindOf(job, job.tensors()[part.tensor]);
      dealers.try_emplace(kind, job, kind, shard_count, &layout.slices_).first->second.Add(b, part);
    }
  }
  for (auto& [kind, dealer] : dealers) dealer.Close();
  for (BucketLayout& slice : layout.slices_) NumberRuns(&slice);

  layout.shard_elements_.assign(shard_count, 0);
  for (const BucketLayout& slice : layout.slices_) layout.shard_elements_[slice.shard] += slice.elements;
  // Jobs without slice_bytes have slices of no elements, too: their journals count them.
  if (job.spec().slice_bytes() != 0) {
    std::erase_if(layout.slices_, [&layout](const BucketLayout& slice) {
      const bool only_one = layout.shard_elements_[slice.shard] == 0 && slice.job_bucket == 0;
      return slice.elements == 0 && !only_one;
    });
  }
  layout.of_shard_.resize(shard_count);
  uint64_t digest = HashCombine(job.digest(), shard_count);
  for (uint32_t i = 0; i < layout.slices_.size(); ++i) {
    BucketLayout& slice = layout.slices_[i];
    layout.first_slice_.resize(slice.job_bucket + 1, i);
    std::vector<uint32_t>& of_shard = layout.of_shard_[slice.shard];
    slice.bucket = static_cast<uint32_t>(of_shard.size());
    of_shard.push_back(i);
    slice.shape_digest = ShapeDigest(job, slice, shard_count);
    digest = HashCombine(digest, slice.shape_digest);
  }
  layout.first_slice_.resize(layout.buckets_.size() + 1, static_cast<uint32_t>(layout.slices_.size()));
  layout.digest_ = digest;
  return layout;
}

const BucketLayout* Layout::find(uint32_t job_bucket, uint32_t shard) const {
  const auto begin = slices_.begin() + first_slice_[job_bucket], end = slices_.begin() + first_slice_[job_bucket + 1];
  const auto it = std::ranges::lower_bound(begin, end, shard, {}, &BucketLayout::shard);
  return it == end || it->shard != shard ? nullptr : &*it;
}

}  // namespace gradwire
