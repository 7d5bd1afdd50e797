// Codecs whose frames are merged as integers, a few bits per element (levels.h).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/family.h"
#include "common/codec/homomorphic/levels.h"

namespace gradwire::homomorphic {

const CodecFamily& Family();

// Errors: InvalidArgument where the sums of max_workers get too long.
absl::StatusOr<std::unique_ptr<Codec>> MakeHomomorphicCodec(const CodecContext& context, const HomomorphicSpec& spec);

// Reads the segments of an update frame (kLevelSums) as means. Borrows; not thread-safe.
class MeansReader {
 public:
  MeansReader(const Job* job, const BucketLayout* layout, const HomomorphicSpec& spec);

  // The means of the elements that `segment` covers, s.count of them. `exponents`: of the round's plan, one per run.
  // Errors: InvalidArgument (not whole runs; bytes that do not fit).
  absl::Status Read(const wire::Segment& segment, uint64_t round, std::span<const int8_t> exponents,
                    uint32_t contributors, float* out);

 private:
  const Job& job_;
  const BucketLayout& layout_;
  const std::unique_ptr<const Levels> levels_;
  std::vector<int32_t> sums_;
  Scratch scratch_;
};

}  // namespace gradwire::homomorphic
