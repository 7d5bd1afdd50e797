// Manifest and tensors to a ShardState; see snapshot_reader.h.
#include "common/snapshot/snapshot_reader.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/codec/plan/plan_check.h"
#include "common/snapshot/safetensors.h"
#include "common/snapshot/snapshot_format.h"
#include "common/storage/files.h"

namespace gradwire {
namespace {

using namespace snapshot;

constexpr size_t kDigits = 20;
constexpr uint64_t kMaxManifestBytes = 1u << 30;
constexpr uint64_t kMaxFileBytes = 1ull << 42;
constexpr uint64_t kReadBytes = 1u << 20;  // hashed while they are in the cache

absl::Status Damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrFormat("snapshot damaged at '%s': %s", path, what));
}

// The JSON may be any; what is not of the type counts as missing.
std::string TextAt(const nlohmann::json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

bool NumberAt(const nlohmann::json& object, const char* key, uint64_t most, uint64_t* number) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_unsigned() || it->get<uint64_t>() > most) return false;
  *number = it->get<uint64_t>();
  return true;
}

bool AheadAt(const nlohmann::json& object, SnapshotManifest* manifest) {
  const auto it = object.find("ahead");
  if (it == object.end() || !it->is_array()) return false;
  for (const nlohmann::json& versions : *it) {
    if (!versions.is_number_unsigned() || versions.get<uint64_t>() > UINT64_MAX - manifest->version) return false;
    manifest->ahead.push_back(versions.get<uint64_t>());
  }
  return true;
}

// Manifests of before have no digest, and are believed.
bool IsIntact(const std::vector<uint8_t>& bytes, const nlohmann::json& json) {
  if (!json.is_object() || !json.contains(kManifestDigest)) return true;
  const std::string digest = TextAt(json, kManifestDigest);
  const std::string line = ManifestDigestLine(digest);
  std::string text(bytes.begin(), bytes.end());
  const size_t at = text.find(line);
  if (at == std::string::npos) return false;
  text.erase(at, line.size());
  Sha256 sha;
  sha.Update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  return sha.Hex() == digest;
}

// A file of a snapshot, checked against the manifest.
struct Loaded {
  std::unique_ptr<uint8_t[]> memory;
  std::span<const uint8_t> bytes;
  SafetensorsHeader header;
  std::string path;

  absl::StatusOr<std::span<const uint8_t>> Find(const std::string& name, TensorType type,
                                                uint64_t bytes_expected) const {
    const auto it = header.entries.find(name);
    if (it == header.entries.end() || it->second.type != type || it->second.bytes != bytes_expected) {
      return Damaged(path, absl::StrFormat("no tensor '%s' of %d bytes", name, bytes_expected));
    }
    return bytes.subspan(header.data_begin + it->second.begin, it->second.bytes);
  }
};

absl::StatusOr<Loaded> LoadFile(Disk& disk, const std::string& directory, const char* name,
                                const SnapshotManifest& manifest) {
  Loaded loaded;
  loaded.path = directory + "/" + name;
  const absl::StatusOr<std::unique_ptr<ReadFile>> file = disk.Open(loaded.path);
  if (absl::IsNotFound(file.status())) return Damaged(loaded.path, "the file is missing");
  GW_RETURN_IF_ERROR(file.status());
  const uint64_t size = (*file)->size();
  if (size > kMaxFileBytes) return Damaged(loaded.path, absl::StrFormat("it has %d bytes", size));
  loaded.memory = std::make_unique_for_overwrite<uint8_t[]>(size);
  loaded.bytes = {loaded.memory.get(), size};
  Sha256 sha;
  for (uint64_t begin = 0; begin < size; begin += kReadBytes) {
    const std::span<uint8_t> part(loaded.memory.get() + begin, std::min(kReadBytes, size - begin));
    GW_RETURN_IF_ERROR((*file)->Read(begin, part));
    sha.Update(std::span<const uint8_t>(part));
  }
  const std::string digest = sha.Hex();
  const auto expected = manifest.sha256.find(name);
  if (expected == manifest.sha256.end() || expected->second != digest) {
    return Damaged(loaded.path, absl::StrFormat("its SHA-256 is %s, the manifest says otherwise", digest));
  }
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(loaded.bytes, size);
  if (!header.ok()) return Damaged(loaded.path, std::string(header.status().message()));
  loaded.header = *std::move(header);
  return loaded;
}

absl::Status FillArray(const Loaded& file, const std::string& prefix, const Job& job,
                       const std::vector<std::vector<Piece>>& pieces, Array array, ShardState* state) {
  for (size_t t = 0; t < pieces.size(); ++t) {
    const uint64_t elements = ElementsOf(pieces[t]);
    if (elements == 0 || !Keeps(job, job.tensors()[t], array)) continue;
    GW_ASSIGN_OR_RETURN(std::span<const uint8_t> data,
                        file.Find(prefix + job.tensors()[t].name, TensorType::kF32, elements * sizeof(float)));
    for (const Piece& piece : pieces[t]) {
      std::memcpy((state->buckets[piece.bucket].*array).data() + piece.position, data.data(),
                  piece.length * sizeof(float));
      data = data.subspan(piece.length * sizeof(float));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PlanWindow> LoadPlans(const Loaded& file, const Job& job, const BucketLayout& slice, uint64_t version,
                                     uint32_t nonfinite_rounds) {
  std::deque<RoundPlan> plans;
  for (uint64_t age = 0; age < PlansKept(job) && age <= version; ++age) {
    const std::string name = ExponentsName(slice.bucket, age);
    const auto exponents = file.header.entries.find(name);
    const uint64_t count = exponents == file.header.entries.end() ? 0 : exponents->second.bytes;
    GW_ASSIGN_OR_RETURN(const auto exponent_bytes, file.Find(name, TensorType::kI8, count));
    GW_ASSIGN_OR_RETURN(const auto geometry, file.Find(GeometryName(slice.bucket, age), TensorType::kU32, 8));
    RoundPlan& plan = plans.emplace_back();
    plan.exponents.assign(exponent_bytes.begin(), exponent_bytes.end());
    std::memcpy(&plan.sketch_groups, geometry.data(), 4);
    std::memcpy(&plan.cells_per_group, geometry.data() + 4, 4);
    const std::string factors_name = FactorsName(slice.bucket, age);
    if (const auto factors = file.header.entries.find(factors_name); factors != file.header.entries.end()) {
      GW_ASSIGN_OR_RETURN(const auto values, file.Find(factors_name, TensorType::kF32, factors->second.bytes));
      plan.factors.resize(values.size() / sizeof(float));
      std::memcpy(plan.factors.data(), values.data(), values.size());
    }
    const absl::Status checked = CheckPlan(job, slice, version - age, plan);
    if (!checked.ok()) return Damaged(file.path, std::string(checked.message()));
  }
  return PlanWindow(PlansKept(job), version, std::move(plans), nonfinite_rounds);
}

}  // namespace

std::string SnapshotPath(const std::string& directory, uint64_t version) {
  return absl::StrFormat("%s/%020d", directory, version);
}

absl::StatusOr<std::vector<uint64_t>> ListSnapshots(Disk& disk, const std::string& directory) {
  const absl::StatusOr<std::vector<std::string>> names = disk.List(directory);
  if (absl::IsNotFound(names.status())) return std::vector<uint64_t>();
  GW_RETURN_IF_ERROR(names.status());
  std::vector<uint64_t> versions;
  for (const std::string& name : *names) {
    uint64_t version = 0;
    if (name.size() == kDigits && absl::SimpleAtoi(name, &version)) versions.push_back(version);
  }
  std::sort(versions.begin(), versions.end());
  return versions;
}

absl::StatusOr<SnapshotManifest> ReadManifest(Disk& disk, const std::string& directory) {
  const std::string path = directory + "/" + kManifest;
  const absl::StatusOr<std::vector<uint8_t>> text = ReadWholeFile(disk, path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) return Damaged(path, "the file is missing");
  GW_RETURN_IF_ERROR(text.status());
  const nlohmann::json json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!IsIntact(*text, json)) return Damaged(path, "its SHA-256 is not the one that it says");
  SnapshotManifest manifest;
  uint64_t format_version = 0, shard = 0, shards = 0;
  if (!json.is_object() || TextAt(json, "format") != kFormat ||
      !NumberAt(json, "format_version", UINT32_MAX, &format_version) ||
      !NumberAt(json, "version", UINT64_MAX, &manifest.version) || !NumberAt(json, "shard", UINT32_MAX, &shard) ||
      !NumberAt(json, "shards", UINT32_MAX, &shards)) {
    return Damaged(path, "not the manifest of a snapshot");
  }
  if (format_version < kFormatVersion || format_version > kSkipsFormatVersion) {
    return absl::FailedPreconditionError(absl::StrFormat("'%s' is of format version %d; this program reads %d to %d",
                                                         path, format_version, kFormatVersion, kSkipsFormatVersion));
  }
  uint64_t skipped = 0;
  if (format_version == kSkipsFormatVersion &&
      !NumberAt(json, kNonFiniteRounds, std::min<uint64_t>(manifest.version, UINT32_MAX), &skipped)) {
    return Damaged(path, "it does not say how many rounds were skipped");
  }
  manifest.nonfinite_rounds = static_cast<uint32_t>(skipped);
  if (format_version == kAheadFormatVersion && !AheadAt(json, &manifest)) {
    return Damaged(path, "it does not say how far its buckets are ahead");
  }
  manifest.shard = static_cast<uint32_t>(shard);
  manifest.shards = static_cast<uint32_t>(shards);
  manifest.job = TextAt(json, "job");
  manifest.job_digest = TextAt(json, "job_digest");
  manifest.layout_digest = TextAt(json, "layout_digest");
  const auto files = json.find("files");
  if (files != json.end() && files->is_object()) {
    for (const auto& [name, file] : files->items()) {
      if (file.is_object()) manifest.sha256[name] = TextAt(file, "sha256");
    }
  }
  const auto spec = json.find("spec");
  if (spec != json.end()) {
    manifest.spec_json = spec->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  return manifest;
}

absl::StatusOr<Job> JobOf(const SnapshotManifest& manifest) {
  v1::JobSpec spec;
  const absl::Status damaged = absl::DataLossError(
      absl::StrFormat("the spec in the manifest of job '%s' is not the one of its digest", manifest.job));
  if (!google::protobuf::util::JsonStringToMessage(manifest.spec_json, &spec).ok()) return damaged;
  absl::StatusOr<Job> job = Job::Make(spec);
  if (!job.ok() || absl::StrFormat("%016x", job->digest()) != manifest.job_digest) return damaged;
  return job;
}

absl::StatusOr<ShardState> LoadSnapshot(Disk& disk, const std::string& directory, const Job& job, const Layout& layout,
                                        uint32_t shard) {
  GW_ASSIGN_OR_RETURN(const SnapshotManifest manifest, ReadManifest(disk, directory));
  if (manifest.job_digest != absl::StrFormat("%016x", job.digest()) ||
      manifest.layout_digest != absl::StrFormat("%016x", layout.digest()) || manifest.shard != shard) {
    return absl::FailedPreconditionError(
        absl::StrFormat("'%s/%s' is that of another job, shard map or shard", directory, kManifest));
  }
  GW_ASSIGN_OR_RETURN(const Loaded parameters, LoadFile(disk, directory, kParameters, manifest));
  GW_ASSIGN_OR_RETURN(const Loaded rest, LoadFile(disk, directory, kState, manifest));
  ShardState state;
  state.version = manifest.version;
  if (!manifest.ahead.empty() && manifest.ahead.size() != layout.bucket_count(shard)) {
    return Damaged(directory + "/" + kManifest, absl::StrFormat("it has versions of %d buckets; the shard has %d",
                                                                manifest.ahead.size(), layout.bucket_count(shard)));
  }
  state.buckets.resize(layout.bucket_count(shard));
  for (uint32_t b = 0; b < layout.bucket_count(shard); ++b) {
    const BucketLayout& slice = layout.at(b, shard);
    ShardState::Bucket& bucket = state.buckets[b];
    if (!manifest.ahead.empty()) bucket.ahead = manifest.ahead[b];
    bucket.Allocate(job, slice);
    GW_ASSIGN_OR_RETURN(bucket.plans,
                        LoadPlans(rest, job, slice, state.version + bucket.ahead, manifest.nonfinite_rounds));
  }
  const auto pieces = PiecesOf(job, layout, shard);
  GW_RETURN_IF_ERROR(FillArray(parameters, "", job, pieces, &ShardState::Bucket::parameter, &state));
  for (const auto& [prefix, array] : kStateArrays) {
    GW_RETURN_IF_ERROR(FillArray(rest, prefix, job, pieces, array, &state));
  }
  return state;
}

}  // namespace gradwire
