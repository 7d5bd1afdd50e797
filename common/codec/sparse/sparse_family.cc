// The sparse codecs as a kind: updates of pairs, and what they are in words.
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/value_format.h"
#include "common/codec/sparse/sparse_codec.h"
#include "common/codec/sparse/sparse_segment.h"

namespace gradwire::sparse {
namespace {

using wire::Segment;
using wire::SegmentType;

Explanation Explain(const SparseSpec& spec, uint64_t elements) {
  Explanation e;
  const double n = static_cast<double>(elements);
  using Choice = SparseSpec::Choice;
  const bool all = spec.choice == Choice::kNonZero || spec.choice == Choice::kAdaptive ||
                   spec.choice == Choice::kUnion;  // that are not 0
  const double p = all ? 0.01 : spec.density;
  double index_bits = p >= 1 ? 0 : n * -(p * std::log2(p) + (1 - p) * std::log2(1 - p));
  switch (spec.choice) {
    case SparseSpec::Choice::kTopK:
    case SparseSpec::Choice::kDgc:
      e.text = absl::StrFormat(
          "  density=%g  of each tensor, the largest %g %% of the elements; the others wait in the "
          "residual\n",
          p, 100 * p);
      if (spec.warmup_rounds != 0) {
        e.text += absl::StrFormat("  warmup_rounds=%d  the density falls from %g to %g over so many rounds\n",
                                  spec.warmup_rounds, spec.warmup_density, p);
      }
      if (spec.choice != SparseSpec::Choice::kDgc) break;
      e.text += absl::StrFormat(
          "  momentum=%g  of a velocity that each worker adds to its residual, and forgets where it was sent; the "
          "optimizer has none then\n",
          spec.momentum);
      e.text += spec.clip == 0 ? "  clip=0  gradients are taken in as they are\n"
                               : absl::StrFormat(
                                     "  clip=%g  a tensor's gradient is scaled where its norm is above so "
                                     "much divided by the square root of max_workers\n",
                                     spec.clip);
      break;
    case SparseSpec::Choice::kThreshold:
      e.text = absl::StrFormat(
          "  value=%g  elements of this magnitude and above; the others wait in the residual. How "
          "many that are depends on the gradients: bytes below are for 1 %% of them\n",
          spec.threshold);
      break;
    case SparseSpec::Choice::kRandomK:
      e.text = absl::StrFormat(
          "  density=%g  the same random %g %% of the elements from every worker: positions need no "
          "bytes; the others wait in the residual\n",
          p, 100 * p);
      index_bits = 0;
      break;
    case SparseSpec::Choice::kNonZero: {
      using Index = SparseSpec::Index;
      const char* const index = spec.index == Index::kSmallest
                                    ? "index=smallest  coordinates, gaps, stretches or a bitmap"
                                : spec.index == Index::kAuto        ? "index=auto  32-bit coordinates or a bitmap"
                                : spec.index == Index::kCoordinates ? "index=coo   32-bit coordinates"
                                                                    : "index=bitmap  one bit per element";
      e.text = absl::StrFormat(
          "  every element that is not 0, for gradients that are sparse by nature (embeddings); no residual. How many "
          "that are depends on the gradients: bytes below are for 1 %% of them\n"
          "  %s, for pushes and updates\n"
          "  run=%s      elements that are dealt to a shard as one: fewer balance the shards better, and take more "
          "work, and memory for the shard map\n",
          index, spec.run_elements == 0 ? "(256 to 4096, by the size of the job)" : absl::StrCat(spec.run_elements));
      if (spec.index == Index::kAuto || spec.index == Index::kCoordinates) index_bits = 32 * n * p;
      if (spec.index == Index::kBitmap) index_bits = n;
      break;
    }
    case SparseSpec::Choice::kUnion:
      e.text =
          "  of what shards send back: the elements that at least one worker sent. How many that are depends on the "
          "workers: bytes below are for 1 % of them\n";
      break;
    case SparseSpec::Choice::kAdaptive:
      e.text = absl::StrFormat(
          "  every element that is not 0, without loss: as positions and values where that takes fewer bytes, else "
          "all elements as they are; the worker decides for its push and the shard for the update, in each round and "
          "bucket. Bytes below are for 1 %% of them; at most they are those of float32\n"
          "  run=%d      elements that are dealt to a shard as one: fewer balance the shards better, and take more "
          "memory for the shard map\n",
          spec.run_elements);
      break;
  }
  const double bits = 8 * static_cast<double>(BytesOf(spec.values, 801) - BytesOf(spec.values, 1)) / 800;
  e.text += absl::StrFormat("  values in %d bits each%s\n", static_cast<int>(bits),
                            bits == 32 ? ""
                            : spec.choice == SparseSpec::Choice::kNonZero
                                ? ", rounded to nearest"
                                : "; what rounding takes away waits in the residual");
  e.push_bytes = (index_bits + n * p * bits) / 8;
  return e;
}

class PairReader final : public BodyReader {
 public:
  PairReader(const Job& job, const BucketLayout& slice, const SparseSpec& spec) {
    if (spec.choice == SparseSpec::Choice::kRandomK) agreement_ = {&job, &slice, 0, spec.density};
  }

  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kSparse) return NotOfAnUpdate(s);
    Update& update = body->update();
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kSparseFloat));
    GW_RETURN_IF_ERROR(body->Advance(s));
    agreement_.round = update.round;
    Pairs pairs;
    GW_RETURN_IF_ERROR(ReadPairs(s, agreement_, &pairs));
    update.positions.insert(update.positions.end(), pairs.positions.begin(), pairs.positions.end());
    update.values.insert(update.values.end(), pairs.values.begin(), pairs.values.end());
    return absl::OkStatus();
  }

 private:
  Agreement agreement_;
};

class SparseFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const override {
    return MakeSparseCodec(context, std::get<SparseSpec>(spec));
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return sparse::Explain(std::get<SparseSpec>(spec), elements);
  }
  TrainingDefaults Training(const CodecSpec& spec) const override {
    using Choice = SparseSpec::Choice;
    const Choice choice = std::get<SparseSpec>(spec).choice;
    if (choice == Choice::kNonZero || choice == Choice::kAdaptive) return {};
    const bool dgc = choice == Choice::kDgc;
    return {.push_steps = !dgc,
            .gradients_to_sgd = dgc,
            .small_dense = true,
            .union_back = std::get<SparseSpec>(spec).values != SparseSpec::Values::kFp32};
  }
  std::unique_ptr<BodyReader> NewSumReader(const Job& job, const BucketLayout& slice) const override {
    return NewCompressedReader(job, slice, job.codecs()[slice.codec]);
  }
  SegmentType CompressedType(const CodecSpec&) const override { return SegmentType::kSparse; }
  std::unique_ptr<BodyReader> NewCompressedReader(const Job& job, const BucketLayout& slice,
                                                  const CodecSpec& spec) const override {
    return std::make_unique<PairReader>(job, slice, std::get<SparseSpec>(spec));
  }
};

}  // namespace

const CodecFamily& Family() {
  static const SparseFamily family;
  return family;
}

}  // namespace gradwire::sparse
