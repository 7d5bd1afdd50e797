// Tensors of a shard to safetensors files, and the manifest over them; see snapshot_files.h.
#include "common/snapshot/snapshot_files.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <deque>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/background_work.h"
#include "common/base/failpoint.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/snapshot/safetensors.h"
#include "common/snapshot/snapshot_format.h"
#include "common/snapshot/snapshot_reader.h"
#include "common/storage/files.h"

namespace gradwire {
namespace {

using namespace snapshot;

constexpr char kUnfinished[] = ".new";
constexpr char kDamaged[] = ".damaged";

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
      if (!Keeps(job, job.tensors()[t], array)) continue;
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

// Digests and writes what it is given by the block while it is in the cache, and syncs often: the journal on the same
// disk never waits for much of it, and it does not push other things out of memory.
class DigestingFile {
 public:
  explicit DigestingFile(std::unique_ptr<AppendFile> file) : file_(std::move(file)) {}

  absl::Status Append(std::span<const uint8_t> data) {
    while (!data.empty()) {
      const std::span<const uint8_t> part = data.first(std::min(data.size(), kBlockBytes - block_bytes_));
      block_.push_back(part);
      block_bytes_ += part.size();
      data = data.subspan(part.size());
      if (block_bytes_ == kBlockBytes) GW_RETURN_IF_ERROR(WriteBlock());
    }
    return absl::OkStatus();
  }
  absl::StatusOr<Written> Finish() {
    GW_RETURN_IF_ERROR(WriteBlock());
    GW_RETURN_IF_ERROR(Sync());
    return Written{bytes_, sha_.Hex()};
  }

 private:
  static constexpr size_t kBlockBytes = 256 << 10;
  static constexpr uint64_t kSyncBytes = 8 << 20;

  absl::Status WriteBlock() {
    for (const auto part : block_) sha_.Update(part);
    GW_RETURN_IF_ERROR(file_->Append(block_));
    bytes_ += block_bytes_;
    block_.clear();
    block_bytes_ = 0;
    GW_RETURN_IF_ERROR(BackgroundWork::Rest());
    return bytes_ >= synced_ + kSyncBytes ? Sync() : absl::OkStatus();
  }
  absl::Status Sync() {
    GW_RETURN_IF_ERROR(file_->Sync());
    file_->Forget();
    synced_ = bytes_;
    return absl::OkStatus();
  }

  const std::unique_ptr<AppendFile> file_;
  Sha256 sha_;
  std::vector<std::span<const uint8_t>> block_;  // not written yet
  size_t block_bytes_ = 0;
  uint64_t bytes_ = 0;
  uint64_t synced_ = 0;
};

absl::StatusOr<Written> WriteFile(Disk& disk, const std::string& path, Contents contents) {
  const std::vector<uint8_t> header = MakeSafetensorsHeader(&contents.entries, {{"format", "pt"}});
  GW_ASSIGN_OR_RETURN(std::unique_ptr<AppendFile> created, disk.Create(path));
  DigestingFile file(std::move(created));
  GW_RETURN_IF_ERROR(file.Append(header));
  for (const auto piece : contents.data) GW_RETURN_IF_ERROR(file.Append(piece));
  return file.Finish();
}

}  // namespace

absl::Status SnapshotFiles::Write(const ShardState& state) {
  GW_RETURN_IF_ERROR(disk_->CreateDirectory(directory_));
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(directory_.substr(0, directory_.rfind('/'))));
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions, Versions());
  if (std::find(versions.begin(), versions.end(), state.version) != versions.end()) return absl::OkStatus();
  const std::string path = SnapshotPath(directory_, state.version);
  const std::string made = path + kUnfinished;
  GW_RETURN_IF_ERROR(RemoveUnfinished());
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
  std::deque<std::array<uint32_t, 2>> geometries;
  parameters.AddArray("", *job_, pieces, state, &ShardState::Bucket::parameter);
  for (const auto& [prefix, array] : kStateArrays) rest.AddArray(prefix, *job_, pieces, state, array);
  for (uint32_t b = 0; b < state.buckets.size(); ++b) {
    uint64_t age = 0;
    for (const RoundPlan& plan : state.buckets[b].plans.newest_first()) {
      rest.entries.push_back({ExponentsName(b, age), TensorType::kI8, {plan.exponents.size()}});
      rest.data.push_back(BytesOf(plan.exponents.data(), plan.exponents.size()));
      if (!plan.factors.empty()) {
        rest.entries.push_back({FactorsName(b, age), TensorType::kF32, {plan.factors.size()}});
        rest.data.push_back(BytesOf(plan.factors.data(), plan.factors.size()));
      }
      geometries.push_back({plan.sketch_groups, plan.cells_per_group});
      rest.entries.push_back({GeometryName(b, age++), TensorType::kU32, {2}});
      rest.data.push_back(BytesOf(geometries.back().data(), 2));
    }
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
  std::vector<uint64_t> ahead;
  for (const ShardState::Bucket& bucket : state.buckets) ahead.push_back(bucket.ahead);
  const bool same = std::all_of(ahead.begin(), ahead.end(), [](uint64_t versions) { return versions == 0; });
  // The same in every bucket: those of asynchronous rounds skip none.
  const uint32_t skipped = state.buckets.empty() ? 0 : state.buckets[0].plans.nonfinite_rounds();
  manifest["format_version"] = skipped != 0 ? kSkipsFormatVersion : same ? kFormatVersion : kAheadFormatVersion;
  manifest["job"] = job_->spec().name();
  manifest["version"] = state.version;
  if (!same) manifest["ahead"] = ahead;
  if (skipped != 0) manifest[kNonFiniteRounds] = skipped;
  manifest["shard"] = shard_;
  manifest["shards"] = layout_->shard_count();
  manifest["job_digest"] = absl::StrFormat("%016x", job_->digest());
  manifest["layout_digest"] = absl::StrFormat("%016x", layout_->digest());
  manifest["files"][kParameters] = {{"bytes", parameters_file.bytes}, {"sha256", parameters_file.sha256}};
  manifest["files"][kState] = {{"bytes", state_file.bytes}, {"sha256", state_file.sha256}};
  manifest["spec"] = nlohmann::ordered_json::parse(spec, nullptr, /*allow_exceptions=*/false);
  std::string text = manifest.dump(2) + "\n";
  Sha256 sha;
  sha.Update(BytesOf(text.data(), text.size()));
  text.insert(text.find('\n') + 1, ManifestDigestLine(sha.Hex()));
  return WriteFileAtomically(*disk_, path, kManifest, BytesOf(text.data(), text.size()));
}

absl::StatusOr<ShardState> SnapshotFiles::Load(uint64_t version) const {
  GW_ASSIGN_OR_RETURN(ShardState state,
                      LoadSnapshot(*disk_, SnapshotPath(directory_, version), *job_, *layout_, shard_));
  if (state.version == version) return state;
  return absl::DataLossError(absl::StrFormat("snapshot damaged at '%s': its manifest says version %d",
                                             SnapshotPath(directory_, version), state.version));
}

absl::Status SnapshotFiles::RemoveNamed(std::string_view ending) {
  const absl::StatusOr<std::vector<std::string>> names = disk_->List(directory_);
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  GW_RETURN_IF_ERROR(names.status());
  for (const std::string& name : *names) {
    if (name.ends_with(ending)) GW_RETURN_IF_ERROR(RemoveTree(*disk_, directory_ + "/" + name));
  }
  return absl::OkStatus();
}

absl::Status SnapshotFiles::RemoveUnfinished() { return RemoveNamed(kUnfinished); }

absl::StatusOr<uint64_t> SnapshotFiles::RemoveOld(size_t keep) {
  GW_ASSIGN_OR_RETURN(std::vector<uint64_t> versions, Versions());
  if (versions.empty()) return 0;
  const bool enough = versions.size() >= keep;
  GW_RETURN_IF_ERROR(RemoveUnfinished());
  if (enough) GW_RETURN_IF_ERROR(RemoveNamed(kDamaged));
  while (versions.size() > keep) {
    // Under another name first, on disk, too: half of a snapshot must not look like one.
    const std::string path = SnapshotPath(directory_, versions.front());
    GW_RETURN_IF_ERROR(disk_->Rename(path, path + kUnfinished));
    GW_FAILPOINT("snapshot.removing_old");
    GW_RETURN_IF_ERROR(disk_->SyncDirectory(directory_));
    GW_RETURN_IF_ERROR(RemoveTree(*disk_, path + kUnfinished));
    versions.erase(versions.begin());
  }
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(directory_));
  return enough ? versions.front() : 0;
}

absl::Status SnapshotFiles::SetAside(uint64_t version) {
  const std::string path = SnapshotPath(directory_, version);
  GW_RETURN_IF_ERROR(RemoveTree(*disk_, path + kDamaged));
  GW_RETURN_IF_ERROR(disk_->Rename(path, path + kDamaged));
  return disk_->SyncDirectory(directory_);
}

}  // namespace gradwire
