// Tensors of a shard to safetensors files and back, and the manifest over them; see snapshot_files.h.
#include "common/snapshot/snapshot_files.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/codec/plan_check.h"
#include "common/snapshot/safetensors.h"
#include "common/storage/files.h"

namespace gradwire {
namespace {

constexpr char kFormat[] = "gradwire.snapshot";
constexpr int kFormatVersion = 1;
constexpr char kManifest[] = "manifest.json";
constexpr char kParameters[] = "parameters.safetensors";
constexpr char kState[] = "state.safetensors";
constexpr char kUnfinished[] = ".new";
constexpr size_t kDigits = 20;
constexpr uint64_t kMaxManifestBytes = 1u << 30;
constexpr uint64_t kMaxFileBytes = 1ull << 42;

using Array = std::vector<float> ShardState::Bucket::*;

// Where the elements of one tensor lie on this shard, in the order of their offsets.
struct Piece {
  uint32_t bucket = 0;
  uint64_t position = 0;
  uint64_t offset = 0;
  uint32_t length = 0;
};

std::vector<std::vector<Piece>> PiecesOf(const Job& job, const Layout& layout, uint32_t shard) {
  std::vector<std::vector<Piece>> pieces(job.tensors().size());
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
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

uint64_t ElementsOf(const std::vector<Piece>& pieces) {
  uint64_t elements = 0;
  for (const Piece& piece : pieces) elements += piece.length;
  return elements;
}

// A tensor that lies here whole keeps its shape; of another one the parts that lie here follow each other.
std::vector<uint64_t> ShapeOf(const Tensor& tensor, uint64_t elements_here) {
  return elements_here == tensor.elements ? tensor.shape : std::vector<uint64_t>{elements_here};
}

template <typename T>
std::span<const uint8_t> BytesOf(const T* data, size_t count) {
  return {reinterpret_cast<const uint8_t*>(data), count * sizeof(T)};
}

// One safetensors file as entries and, in the same order, the memory that fills them.
struct Contents {
  std::vector<TensorEntry> entries;
  std::vector<std::span<const uint8_t>> data;

  void AddArray(const std::string& prefix, const Job& job, const std::vector<std::vector<Piece>>& pieces,
                const ShardState& state, Array array) {
    for (size_t t = 0; t < pieces.size(); ++t) {
      const uint64_t elements = ElementsOf(pieces[t]);
      if (elements == 0 && job.tensors()[t].elements > 0) continue;
      entries.push_back({prefix + job.tensors()[t].name, TensorType::kF32, ShapeOf(job.tensors()[t], elements)});
      for (const Piece& piece : pieces[t]) {
        data.push_back(BytesOf((state.buckets[piece.bucket].*array).data() + piece.position, piece.length));
      }
    }
  }
};

struct Written {
  uint64_t bytes = 0;
  std::string sha256;
};

absl::StatusOr<Written> WriteFile(Disk& disk, const std::string& path, Contents contents) {
  const std::vector<uint8_t> header = MakeSafetensorsHeader(&contents.entries, {{"format", "pt"}});
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<AppendFile> file, disk.Create(path));
  std::vector<std::span<const uint8_t>> pieces = {header};
  pieces.insert(pieces.end(), contents.data.begin(), contents.data.end());
  GW_RETURN_IF_ERROR(file->Append(pieces));
  GW_RETURN_IF_ERROR(file->Sync());
  Written written;
  Sha256 sha;
  for (const auto piece : pieces) {
    sha.Update(piece);
    written.bytes += piece.size();
  }
  written.sha256 = sha.Hex();
  return written;
}

absl::Status Damaged(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrFormat("snapshot damaged at '%s': %s", path, what));
}

// A file of a snapshot, checked against the manifest.
struct Loaded {
  std::vector<uint8_t> bytes;
  SafetensorsHeader header;
  std::string path;

  absl::StatusOr<std::span<const uint8_t>> Find(const std::string& name, TensorType type,
                                                uint64_t bytes_expected) const {
    const auto it = header.entries.find(name);
    if (it == header.entries.end() || it->second.type != type || it->second.bytes != bytes_expected) {
      return Damaged(path, absl::StrFormat("no tensor '%s' of %d bytes", name, bytes_expected));
    }
    return std::span(bytes).subspan(header.data_begin + it->second.begin, it->second.bytes);
  }
};

// What the manifest says of a file; empty where it says nothing. It may hold any JSON.
std::string DigestOf(const nlohmann::json& manifest, const char* name) {
  const auto files = manifest.find("files");
  if (files == manifest.end() || !files->is_object()) return "";
  const auto file = files->find(name);
  if (file == files->end() || !file->is_object()) return "";
  const auto digest = file->find("sha256");
  return digest != file->end() && digest->is_string() ? digest->get<std::string>() : "";
}

absl::StatusOr<Loaded> LoadFile(Disk& disk, const std::string& directory, const char* name,
                                const nlohmann::json& manifest) {
  Loaded loaded;
  loaded.path = directory + "/" + name;
  absl::StatusOr<std::vector<uint8_t>> bytes = ReadWholeFile(disk, loaded.path, kMaxFileBytes);
  if (absl::IsNotFound(bytes.status())) return Damaged(loaded.path, "the file is missing");
  GW_RETURN_IF_ERROR(bytes.status());
  loaded.bytes = *std::move(bytes);
  Sha256 sha;
  sha.Update(std::span<const uint8_t>(loaded.bytes));
  const std::string digest = sha.Hex();
  if (DigestOf(manifest, name) != digest) {
    return Damaged(loaded.path, absl::StrFormat("its SHA-256 is %s, the manifest says otherwise", digest));
  }
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(loaded.bytes, loaded.bytes.size());
  if (!header.ok()) return Damaged(loaded.path, std::string(header.status().message()));
  loaded.header = *std::move(header);
  return loaded;
}

absl::Status FillArray(const Loaded& file, const std::string& prefix, const Job& job,
                       const std::vector<std::vector<Piece>>& pieces, Array array, ShardState* state) {
  for (size_t t = 0; t < pieces.size(); ++t) {
    const uint64_t elements = ElementsOf(pieces[t]);
    if (elements == 0) continue;
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

std::string ExponentsName(uint32_t bucket) { return absl::StrFormat("exponents/%d", bucket); }
std::string GeometryName(uint32_t bucket) { return absl::StrFormat("geometry/%d", bucket); }

}  // namespace

std::string SnapshotFiles::PathOf(uint64_t version) const { return absl::StrFormat("%s/%020d", directory_, version); }

absl::Status SnapshotFiles::Write(const ShardState& state) {
  GW_RETURN_IF_ERROR(disk_->CreateDirectory(directory_));
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(directory_.substr(0, directory_.rfind('/'))));
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions, Versions());
  if (std::find(versions.begin(), versions.end(), state.version) != versions.end()) return absl::OkStatus();
  const std::string path = PathOf(state.version);
  const std::string made = path + kUnfinished;
  GW_RETURN_IF_ERROR(RemoveTree(*disk_, made));
  GW_RETURN_IF_ERROR(disk_->CreateDirectory(made));
  absl::Status status = WriteTo(made, state);
  GW_FAILPOINT("snapshot.before_rename");
  if (status.ok()) status = disk_->Rename(made, path);
  GW_FAILPOINT("snapshot.after_rename");
  if (status.ok()) return disk_->SyncDirectory(directory_);
  RemoveTree(*disk_, made).IgnoreError();  // gives the room back; otherwise the next Write does
  return status;
}

absl::Status SnapshotFiles::WriteTo(const std::string& path, const ShardState& state) const {
  const auto pieces = PiecesOf(*job_, *layout_, shard_);
  Contents parameters;
  Contents rest;
  std::vector<std::array<uint32_t, 2>> geometries;
  geometries.reserve(state.buckets.size());
  if (job_->keeps_parameters()) parameters.AddArray("", *job_, pieces, state, &ShardState::Bucket::parameter);
  if (job_->moments() > 0) rest.AddArray("first_moment/", *job_, pieces, state, &ShardState::Bucket::first_moment);
  if (job_->moments() > 1) rest.AddArray("second_moment/", *job_, pieces, state, &ShardState::Bucket::second_moment);
  for (uint32_t b = 0; b < state.buckets.size(); ++b) {
    const RoundPlan& plan = state.buckets[b].plan;
    rest.entries.push_back({ExponentsName(b), TensorType::kI8, {plan.exponents.size()}});
    rest.data.push_back(BytesOf(plan.exponents.data(), plan.exponents.size()));
    geometries.push_back({plan.sketch_groups, plan.cells_per_group});
    rest.entries.push_back({GeometryName(b), TensorType::kU32, {2}});
    rest.data.push_back(BytesOf(geometries.back().data(), 2));
  }
  GW_ASSIGN_OR_RETURN(const Written parameters_file,
                      WriteFile(*disk_, path + "/" + kParameters, std::move(parameters)));
  GW_FAILPOINT("snapshot.between_files");
  GW_ASSIGN_OR_RETURN(const Written state_file, WriteFile(*disk_, path + "/" + kState, std::move(rest)));
  std::string spec;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(job_->spec(), &spec, options).ok()) {
    return absl::InternalError("the job's spec has no JSON form");
  }
  nlohmann::ordered_json manifest;
  manifest["format"] = kFormat;
  manifest["format_version"] = kFormatVersion;
  manifest["job"] = job_->spec().name();
  manifest["version"] = state.version;
  manifest["shard"] = shard_;
  manifest["shards"] = layout_->shard_count();
  manifest["job_digest"] = absl::StrFormat("%016x", job_->digest());
  manifest["layout_digest"] = absl::StrFormat("%016x", layout_->digest());
  manifest["files"][kParameters] = {{"bytes", parameters_file.bytes}, {"sha256", parameters_file.sha256}};
  manifest["files"][kState] = {{"bytes", state_file.bytes}, {"sha256", state_file.sha256}};
  manifest["spec"] = nlohmann::ordered_json::parse(spec, nullptr, /*allow_exceptions=*/false);
  const std::string text = manifest.dump(2) + "\n";
  return WriteFileAtomically(*disk_, path, kManifest, BytesOf(text.data(), text.size()));
}

absl::StatusOr<std::vector<uint64_t>> SnapshotFiles::Versions() const {
  const absl::StatusOr<std::vector<std::string>> names = disk_->List(directory_);
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

absl::StatusOr<ShardState> SnapshotFiles::Load(uint64_t version) const {
  const std::string path = PathOf(version);
  const std::string manifest_path = path + "/" + kManifest;
  const absl::StatusOr<std::vector<uint8_t>> text = ReadWholeFile(*disk_, manifest_path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) return Damaged(manifest_path, "the file is missing");
  GW_RETURN_IF_ERROR(text.status());
  const nlohmann::json manifest = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, const nlohmann::json& value) {
    return manifest.contains(key) && manifest[key] == value;
  };
  if (!manifest.is_object() || !is("format", kFormat) || !is("format_version", kFormatVersion) || !is("version", version)) {
    return Damaged(manifest_path, "not the manifest of this version");
  }
  if (!is("job_digest", absl::StrFormat("%016x", job_->digest())) ||
      !is("layout_digest", absl::StrFormat("%016x", layout_->digest())) || !is("shard", shard_)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("'%s' is the snapshot of another job, shard map or shard", manifest_path));
  }
  GW_ASSIGN_OR_RETURN(const Loaded parameters, LoadFile(*disk_, path, kParameters, manifest));
  GW_ASSIGN_OR_RETURN(const Loaded rest, LoadFile(*disk_, path, kState, manifest));
  ShardState state;
  state.version = version;
  state.buckets.resize(layout_->bucket_count());
  for (uint32_t b = 0; b < layout_->bucket_count(); ++b) {
    const BucketLayout& slice = layout_->at(b, shard_);
    ShardState::Bucket& bucket = state.buckets[b];
    if (job_->keeps_parameters()) bucket.parameter.resize(slice.elements);
    if (job_->moments() > 0) bucket.first_moment.resize(slice.elements);
    if (job_->moments() > 1) bucket.second_moment.resize(slice.elements);
    const auto exponents = rest.header.entries.find(ExponentsName(b));
    const uint64_t count = exponents == rest.header.entries.end() ? 0 : exponents->second.bytes;
    GW_ASSIGN_OR_RETURN(const auto exponent_bytes, rest.Find(ExponentsName(b), TensorType::kI8, count));
    GW_ASSIGN_OR_RETURN(const auto geometry, rest.Find(GeometryName(b), TensorType::kU32, 8));
    bucket.plan.exponents.assign(exponent_bytes.begin(), exponent_bytes.end());
    std::memcpy(&bucket.plan.sketch_groups, geometry.data(), 4);
    std::memcpy(&bucket.plan.cells_per_group, geometry.data() + 4, 4);
    GW_RETURN_IF_ERROR(CheckPlan(*job_, slice, bucket.plan));
  }
  const auto pieces = PiecesOf(*job_, *layout_, shard_);
  if (job_->keeps_parameters()) {
    GW_RETURN_IF_ERROR(FillArray(parameters, "", *job_, pieces, &ShardState::Bucket::parameter, &state));
  }
  if (job_->moments() > 0) {
    GW_RETURN_IF_ERROR(FillArray(rest, "first_moment/", *job_, pieces, &ShardState::Bucket::first_moment, &state));
  }
  if (job_->moments() > 1) {
    GW_RETURN_IF_ERROR(FillArray(rest, "second_moment/", *job_, pieces, &ShardState::Bucket::second_moment, &state));
  }
  return state;
}

absl::StatusOr<uint64_t> SnapshotFiles::RemoveOld(size_t keep) {
  GW_ASSIGN_OR_RETURN(std::vector<uint64_t> versions, Versions());
  if (versions.empty()) return 0;
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk_->List(directory_));
  for (const std::string& name : names) {
    if (name.ends_with(kUnfinished)) GW_RETURN_IF_ERROR(RemoveTree(*disk_, directory_ + "/" + name));
  }
  while (versions.size() > keep) {
    // Under another name first: half of a snapshot must not look like one.
    const std::string path = PathOf(versions.front());
    GW_RETURN_IF_ERROR(disk_->Rename(path, path + kUnfinished));
    GW_FAILPOINT("snapshot.removing_old");
    GW_RETURN_IF_ERROR(RemoveTree(*disk_, path + kUnfinished));
    versions.erase(versions.begin());
  }
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(directory_));
  return versions.front();
}

}  // namespace gradwire
