// What writing and reading a snapshot share: names, and where the parts of each tensor lie. Spec: proto/SNAPSHOT.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/snapshot/shard_state.h"

namespace gradwire::snapshot {

inline constexpr char kFormat[] = "gradwire.snapshot";
inline constexpr int kFormatVersion = 1;       // all buckets are of the snapshot's version
inline constexpr int kAheadFormatVersion = 2;  // some are later ones: "ahead" says how much
inline constexpr int kSkipsFormatVersion = 3;  // rounds before it were skipped: "nonfinite_rounds" says how many
inline constexpr char kNonFiniteRounds[] = "nonfinite_rounds";
inline constexpr char kManifestDigest[] = "manifest_sha256";  // of the manifest without the line of this key
inline std::string ManifestDigestLine(const std::string& hex) {
  return absl::StrCat("  \"", kManifestDigest, "\": \"", hex, "\",\n");
}
inline constexpr char kManifest[] = "manifest.json";
inline constexpr char kParameters[] = "parameters.safetensors";
inline constexpr char kState[] = "state.safetensors";
inline constexpr char kFirstMoment[] = "first_moment/";  // before the names of tensors
inline constexpr char kSecondMoment[] = "second_moment/";
inline constexpr char kUpdateResidual[] = "update_residual/";  // of tensors that keep one
// `age`: versions before that of the snapshot.
inline std::string PlanName(const char* part, uint32_t bucket, uint64_t age) {
  return age == 0 ? absl::StrCat(part, "/", bucket) : absl::StrCat(part, "/", bucket, "/", age);
}
inline std::string ExponentsName(uint32_t bucket, uint64_t age) { return PlanName("exponents", bucket, age); }
inline std::string GeometryName(uint32_t bucket, uint64_t age) { return PlanName("geometry", bucket, age); }
inline std::string FactorsName(uint32_t bucket, uint64_t age) { return PlanName("factors", bucket, age); }

using Array = std::vector<float> ShardState::Bucket::*;

// The arrays of kState.
inline constexpr std::pair<const char*, Array> kStateArrays[] = {
    {kFirstMoment, &ShardState::Bucket::first_moment},
    {kSecondMoment, &ShardState::Bucket::second_moment},
    {kUpdateResidual, &ShardState::Bucket::update_residual}};

// Whether a shard keeps this array of a tensor: as ShardState::Bucket::Allocate.
inline bool Keeps(const Job& job, const Tensor& tensor, Array array) {
  if (array == &ShardState::Bucket::parameter) return job.keeps_parameters();
  if (array == &ShardState::Bucket::first_moment) return job.moments() > 0;
  if (array == &ShardState::Bucket::second_moment) return job.moments() > 1;
  return KeepsUpdateResidual(job, tensor.codec);
}

// Where the elements of one tensor lie on this shard, in the order of their offsets.
struct Piece {
  uint32_t bucket = 0;
  uint64_t position = 0;
  uint64_t offset = 0;
  uint32_t length = 0;
};

inline std::vector<std::vector<Piece>> PiecesOf(const Job& job, const Layout& layout, uint32_t shard) {
  std::vector<std::vector<Piece>> pieces(job.tensors().size());
  for (uint32_t b = 0; b < layout.bucket_count(shard); ++b) {
    const BucketLayout& slice = layout.at(b, shard);
    for (size_t r = 0; r < slice.runs.size(); ++r) {
      const Run& run = slice.runs[r];
      pieces[run.tensor].push_back({b, slice.run_begin[r], run.offset, run.length});
    }
  }
  for (auto& list : pieces) {
    std::sort(list.begin(), list.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  }
  return pieces;
}

inline uint64_t ElementsOf(const std::vector<Piece>& pieces) {
  uint64_t elements = 0;
  for (const Piece& piece : pieces) elements += piece.length;
  return elements;
}

}  // namespace gradwire::snapshot
