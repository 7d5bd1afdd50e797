// See checkpoint.h.
#include "client/cpp/internal/checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/failpoint.h"
#include "common/base/little_endian.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/codec/plan/plan_check.h"
#include "common/job/norms.h"
#include "common/storage/files.h"

namespace gradwire::client {
namespace {

constexpr char kFormat[] = "gradwire.checkpoint";
constexpr char kFormatVersion[] = "1";
constexpr char kDigestKey[] = "sha256";
constexpr char kSteps[] = "steps";
constexpr char kNonFiniteRounds[] = "nonfinite_rounds";
constexpr char kServerLineages[] = "server_lineages";
constexpr char kJobInstances[] = "job_instances";
constexpr char kNote[] = "note.";
constexpr char kParameter[] = "parameter";
constexpr char kFirstMoment[] = "first_moment";
constexpr char kSecondMoment[] = "second_moment";
constexpr char kResidual[] = "residual";
constexpr char kPreconditioner[] = "preconditioner";
constexpr char kVelocity[] = "velocity";
constexpr uint64_t kMaxFileBytes = 1ull << 42;
constexpr uint64_t kMaxNotesBytes = 1 << 20;  // names and values of all notes; a reader takes headers up to a limit

using Metadata = std::map<std::string, std::string>;

constexpr std::pair<PullMode, const char*> kPullModes[] = {{PullMode::kUpdate, "update"},
                                                           {PullMode::kParams, "params"},
                                                           {PullMode::kParamsBf16, "params_bf16"},
                                                           {PullMode::kMean, "mean"}};

std::string NameOf(PullMode pull) {
  for (const auto& [mode, name] : kPullModes)
    if (mode == pull) return name;
  return "";
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }
bool ParseHex(const std::string& text, uint64_t* value) { return absl::SimpleHexAtoi(text, value); }

// `age`: versions before that of the checkpoint.
std::string PlanName(const char* part, const BucketLayout& slice, uint64_t age) {
  const std::string newest = absl::StrFormat("%s/%d/%d", part, slice.bucket, slice.shard);
  return age == 0 ? newest : absl::StrFormat("%s/%d", newest, age);
}

template <typename T>
std::span<const uint8_t> AsBytes(std::span<const T> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

// Over the metadata without the digest itself, then every tensor's name and bytes, all in the order of their names.
class ContentDigest {
 public:
  explicit ContentDigest(const Metadata& metadata) {
    for (const auto& [key, value] : metadata)
      if (key != kDigestKey) Add(absl::StrFormat("%s=%s\n", key, value));
  }
  void AddTensor(const std::string& name, std::span<const uint8_t> data) {
    Add(absl::StrFormat("%s:%d\n", name, data.size()));
    sha_.Update(data);
  }
  std::string Hex() { return sha_.Hex(); }

 private:
  void Add(const std::string& text) { sha_.Update(AsBytes(std::span<const char>(text))); }
  Sha256 sha_;
};

// The tensors of a file and the memory that fills them; float32 first, so that they lie aligned.
struct TensorList {
  std::vector<TensorEntry> entries;
  std::vector<std::span<const uint8_t>> data;
  std::deque<HostView> views;  // that `data` refers to

  template <typename T>
  void Add(std::string name, TensorType type, std::vector<uint64_t> shape, std::span<const T> values) {
    entries.push_back({std::move(name), type, std::move(shape)});
    data.push_back(AsBytes(values));
  }
  void AddFloats(const char* kind, const Tensor& tensor, HostView view) {
    if (view.values.empty()) return;
    views.push_back(std::move(view));
    Add(absl::StrFormat("%s/%s", kind, tensor.name), TensorType::kF32, tensor.shape, views.back().values);
  }
};

// A file with other notes could not be read.
absl::Status CheckNotes(const Metadata& notes) {
  uint64_t bytes = 0;
  for (const auto& [name, value] : notes) bytes += name.size() + value.size();
  if (bytes > kMaxNotesBytes)
    return absl::InvalidArgumentError(
        absl::StrFormat("the notes of a checkpoint have %d bytes; %d are allowed", bytes, kMaxNotesBytes));
  for (const auto& [name, value] : notes)
    if (!IsUtf8(name) || !IsUtf8(value))
      return absl::InvalidArgumentError(
          absl::StrFormat("the note '%s' of a checkpoint is not UTF-8", absl::Utf8SafeCHexEscape(name)));
  return absl::OkStatus();
}

absl::Status WriteTemporary(Disk& disk, const std::string& temporary, const std::string& path, TensorList& tensors,
                            const Metadata& metadata) {
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<AppendFile> file, disk.Create(temporary));
  const std::vector<uint8_t> header = MakeSafetensorsHeader(&tensors.entries, metadata);
  std::vector<std::span<const uint8_t>> pieces = {header};
  pieces.insert(pieces.end(), tensors.data.begin(), tensors.data.end());
  GW_RETURN_IF_ERROR(file->Append(pieces));
  GW_RETURN_IF_ERROR(file->Sync());
  GW_FAILPOINT("checkpoint.before_rename");
  return disk.Rename(temporary, path);
}

absl::Status WriteFile(Disk& disk, const std::string& path, TensorList& tensors, const Metadata& metadata) {
  const std::string temporary = path + ".tmp";
  if (absl::Status gone = disk.Remove(temporary); !gone.ok() && !absl::IsNotFound(gone)) return gone;
  absl::Status written = WriteTemporary(disk, temporary, path, tensors, metadata);
  if (!written.ok()) {
    disk.Remove(temporary).IgnoreError();  // gives the room back; otherwise the next one does
    return written;
  }
  GW_FAILPOINT("checkpoint.after_rename");
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return disk.SyncDirectory(".");
  return disk.SyncDirectory(slash == 0 ? "/" : path.substr(0, slash));
}

}  // namespace

absl::Status WriteCheckpoint(Disk& disk, const std::string& path, const Job& job, const Layout& layout,
                             const CheckpointIdentity& identity, const Replica& replica, const GradientStore& gradients,
                             std::span<const PlanWindow> plans) {
  GW_RETURN_IF_ERROR(CheckNotes(identity.notes));
  TensorList tensors;
  std::vector<uint32_t> steps;
  for (uint32_t t = 0; t < job.tensors().size(); ++t) {
    const Tensor& tensor = job.tensors()[t];
    GradientStore::Kept kept = gradients.KeptOf(t);
    TensorMemory& memory = replica.memory();
    if (identity.pull != PullMode::kMean) tensors.AddFloats(kParameter, tensor, memory.View(replica.parameter(t)));
    tensors.AddFloats(kFirstMoment, tensor, memory.View(replica.first_moment(t)));
    tensors.AddFloats(kSecondMoment, tensor, memory.View(replica.second_moment(t)));
    tensors.AddFloats(kResidual, tensor, std::move(kept.pending));
    tensors.AddFloats(kPreconditioner, tensor, std::move(kept.second_moment));
    tensors.AddFloats(kVelocity, tensor, std::move(kept.velocity));
    steps.push_back(static_cast<uint32_t>(kept.steps));
    steps.push_back(static_cast<uint32_t>(kept.steps >> 32));
  }
  tensors.Add(kSteps, TensorType::kU32, {job.tensors().size(), 2}, std::span<const uint32_t>(steps));
  for (uint32_t i = 0; i < plans.size(); ++i)
    for (uint64_t age = 0; const RoundPlan& plan : plans[i].newest_first())
      if (const std::string name = PlanName("factors", layout.slices()[i], age++); !plan.factors.empty())
        tensors.Add(name, TensorType::kF32, {plan.factors.size()}, std::span<const float>(plan.factors));
  std::deque<std::array<uint32_t, 2>> geometries;
  for (uint32_t i = 0; i < plans.size(); ++i)
    for (uint64_t age = 0; const RoundPlan& plan : plans[i].newest_first())
      tensors.Add(PlanName("geometry", layout.slices()[i], age++), TensorType::kU32, {2},
                  std::span<const uint32_t>(
                      geometries.emplace_back(std::array<uint32_t, 2>{plan.sketch_groups, plan.cells_per_group})));
  for (uint32_t i = 0; i < plans.size(); ++i)
    for (uint64_t age = 0; const RoundPlan& plan : plans[i].newest_first())
      tensors.Add(PlanName("exponents", layout.slices()[i], age++), TensorType::kI8, {plan.exponents.size()},
                  std::span<const int8_t>(plan.exponents));
  const auto hex = [](std::string* out, uint64_t number) { *out += Hex(number); };
  Metadata metadata = {{"format", kFormat},
                       {"format_version", kFormatVersion},
                       {"job", job.spec().name()},
                       {"job_digest", Hex(job.digest())},
                       {"layout_digest", Hex(layout.digest())},
                       {"worker", identity.worker},
                       {"incarnation", Hex(identity.incarnation)},
                       {"version", Hex(identity.version)},
                       {"pull", NameOf(identity.pull)},
                       {"server_epochs", absl::StrJoin(identity.server_epochs, ",", hex)}};
  if (!identity.server_lineages.empty()) metadata[kServerLineages] = absl::StrJoin(identity.server_lineages, ",", hex);
  if (std::ranges::any_of(identity.job_instances, [](uint64_t instance) { return instance != 0; }))
    metadata[kJobInstances] = absl::StrJoin(identity.job_instances, ",", hex);
  if (SkipsNonFinite(job) || plans[0].nonfinite_rounds() != 0)
    metadata[kNonFiniteRounds] = Hex(plans[0].nonfinite_rounds());
  for (const auto& [name, value] : identity.notes) metadata[kNote + name] = value;
  std::map<std::string, std::span<const uint8_t>> by_name;
  for (size_t i = 0; i < tensors.entries.size(); ++i) by_name[tensors.entries[i].name] = tensors.data[i];
  ContentDigest digest(metadata);
  for (const auto& [name, data] : by_name) digest.AddTensor(name, data);
  metadata[kDigestKey] = digest.Hex();
  return WriteFile(disk, path, tensors, metadata);
}

absl::StatusOr<CheckpointFile> CheckpointFile::ReadChecked(Disk& disk, const std::string& path, const Job& job) {
  CheckpointFile file(path, &job);
  GW_ASSIGN_OR_RETURN(file.bytes_, ReadWholeFile(disk, path, kMaxFileBytes));
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(file.bytes_, file.bytes_.size());
  if (!header.ok()) return file.Damaged(std::string(header.status().message()));
  file.header_ = *std::move(header);
  if (file.Metadata("format") != kFormat || file.Metadata("format_version") != kFormatVersion)
    return absl::InvalidArgumentError(
        absl::StrFormat("'%s' is no checkpoint of format version %s: it says format '%s', version '%s'", path,
                        kFormatVersion, file.Metadata("format"), file.Metadata("format_version")));
  GW_RETURN_IF_ERROR(file.CheckDigest());
  GW_RETURN_IF_ERROR(file.ParseIdentity());
  return file;
}

absl::StatusOr<CheckpointFile> CheckpointFile::Read(Disk& disk, const std::string& path, const Job& job,
                                                    const Layout& layout, const std::string& worker, PullMode pull) {
  GW_ASSIGN_OR_RETURN(CheckpointFile file, ReadChecked(disk, path, job));
  GW_RETURN_IF_ERROR(file.CheckSame(layout, worker, pull));
  GW_RETURN_IF_ERROR(file.ParsePlans(layout));
  return file;
}

absl::StatusOr<CheckpointFile> CheckpointFile::ReadForNewJob(Disk& disk, const std::string& path, const Job& job) {
  GW_ASSIGN_OR_RETURN(CheckpointFile file, ReadChecked(disk, path, job));
  for (const Tensor& tensor : job.tensors()) {
    const auto it = file.header_.entries.find(absl::StrFormat("%s/%s", kParameter, tensor.name));
    if (tensor.elements == 0 || (it != file.header_.entries.end() && it->second.type == TensorType::kF32 &&
                                 it->second.bytes == tensor.elements * sizeof(float)))
      continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint '%s' has no parameter '%s' of %d elements, as job '%s' has: it is of another model, or of a job "
        "whose workers pull means",
        path, tensor.name, tensor.elements, job.spec().name()));
  }
  return file;
}

bool CheckpointFile::SameButName() const {
  v1::JobSpec spec = job_->spec();
  spec.set_name(Metadata("job"));
  const auto is_of = [this](const absl::StatusOr<Job>& job) {
    return job.ok() && Metadata("job_digest") == Hex(job->digest());
  };
  if (is_of(Job::Make(spec))) return true;
  // As jobs were by default before there were these.
  spec.clear_table_bucket_bytes();
  if (is_of(Job::Make(spec))) return true;
  spec.clear_slice_bytes();
  return is_of(Job::Make(spec));
}

std::string CheckpointFile::DescribeForNewJob() const {
  return absl::StrFormat(
      "job '%s' begins anew with the parameters of version %d of job '%s', %s; moments that the shards kept begin at 0",
      job_->spec().name(), identity_.version, Metadata("job"),
      SameButName() ? "with this worker's residuals and preconditioner"
                    : "without residuals and preconditioner, for the jobs differ in more than their names");
}

absl::Status CheckpointFile::Damaged(const std::string& what) const {
  return absl::DataLossError(absl::StrFormat(
      "checkpoint '%s' is damaged: %s; join without it to start from what the shards hold", path_, what));
}

std::string CheckpointFile::Metadata(const std::string& key) const {
  const auto it = header_.metadata.find(key);
  return it == header_.metadata.end() ? "" : it->second;
}

absl::Status CheckpointFile::CheckDigest() const {
  ContentDigest digest(header_.metadata);
  for (const auto& [name, entry] : header_.entries)
    digest.AddTensor(name, std::span(bytes_).subspan(header_.data_begin + entry.begin, entry.bytes));
  if (const std::string found = digest.Hex(); found != Metadata(kDigestKey))
    return Damaged(absl::StrFormat("its SHA-256 is %s, it says '%s'", found, Metadata(kDigestKey)));
  return absl::OkStatus();
}

absl::Status CheckpointFile::ParseIdentity() {
  identity_.worker = Metadata("worker");
  bool good =
      ParseHex(Metadata("incarnation"), &identity_.incarnation) && ParseHex(Metadata("version"), &identity_.version);
  for (const auto& [mode, name] : kPullModes)
    if (Metadata("pull") == name) identity_.pull = mode;
  good = good && ParseList("server_epochs", &identity_.server_epochs);
  for (const auto& [key, value] : header_.metadata)
    if (key.starts_with(kNote)) identity_.notes[key.substr(sizeof(kNote) - 1)] = value;
  if (header_.metadata.contains(kServerLineages)) {
    good = good && ParseList(kServerLineages, &identity_.server_lineages) &&
           identity_.server_lineages.size() == identity_.server_epochs.size();
  } else {
    identity_.server_lineages.resize(identity_.server_epochs.size());
  }
  if (header_.metadata.contains(kJobInstances)) {
    good = good && ParseList(kJobInstances, &identity_.job_instances) &&
           identity_.job_instances.size() == identity_.server_epochs.size();
  }
  return good ? absl::OkStatus() : Damaged("its metadata");
}

bool CheckpointFile::ParseList(const std::string& key, std::vector<uint64_t>* numbers) const {
  const std::vector<std::string> words = absl::StrSplit(Metadata(key), ',');
  bool good = true;
  for (const std::string& word : words) good = ParseHex(word, &numbers->emplace_back()) && good;
  return good;
}

absl::Status CheckpointFile::CheckSame(const Layout& layout, const std::string& worker, PullMode pull) const {
  const auto differs = [this](const std::string& what, const std::string& found, const std::string& wanted) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint '%s' is of %s '%s', this session is of '%s': give it the same, or join without the checkpoint",
        path_, what, found, wanted));
  };
  if (identity_.worker != worker) return differs("worker", identity_.worker, worker);
  if (Metadata("job") != job_->spec().name()) return differs("job", Metadata("job"), job_->spec().name());
  if (Metadata("job_digest") != Hex(job_->digest()))
    return differs("a job with the spec", Metadata("job_digest"), Hex(job_->digest()));
  if (Metadata("layout_digest") != Hex(layout.digest()) || identity_.server_epochs.size() != layout.shard_count())
    return differs("shard map", Metadata("layout_digest"), Hex(layout.digest()));
  if (identity_.pull != pull) return differs("pull mode", NameOf(identity_.pull), NameOf(pull));
  return absl::OkStatus();
}

absl::Status CheckpointFile::ParsePlans(const Layout& layout) {
  uint64_t nonfinite_rounds = 0;
  const bool counted = SkipsNonFinite(*job_) || !Metadata(kNonFiniteRounds).empty();
  if (counted && (!ParseHex(Metadata(kNonFiniteRounds), &nonfinite_rounds) || nonfinite_rounds > identity_.version))
    return Damaged("its metadata");
  for (const BucketLayout& slice : layout.slices()) {
    std::deque<RoundPlan> plans;
    for (uint64_t age = 0; age < PlansKept(*job_) && age <= identity_.version; ++age) {
      const std::string name = PlanName("exponents", slice, age);
      const auto exponents = header_.entries.find(name);
      const uint64_t count = exponents == header_.entries.end() ? 0 : exponents->second.bytes;
      GW_ASSIGN_OR_RETURN(const auto values, Find(name, TensorType::kI8, count));
      GW_ASSIGN_OR_RETURN(const auto geometry, Find(PlanName("geometry", slice, age), TensorType::kU32, 8));
      RoundPlan& plan = plans.emplace_back();
      plan.exponents.assign(values.begin(), values.end());
      plan.sketch_groups = Load<uint32_t>(geometry.data());
      plan.cells_per_group = Load<uint32_t>(geometry.data() + 4);
      const std::string factors_name = PlanName("factors", slice, age);
      if (const auto factors = header_.entries.find(factors_name); factors != header_.entries.end()) {
        GW_ASSIGN_OR_RETURN(const auto bytes, Find(factors_name, TensorType::kF32, factors->second.bytes));
        plan.factors.resize(bytes.size() / sizeof(float));
        std::memcpy(plan.factors.data(), bytes.data(), bytes.size());
      }
      GW_RETURN_IF_ERROR(CheckPlan(*job_, slice, identity_.version - age, plan));
    }
    plans_.emplace_back(PlansKept(*job_), identity_.version, std::move(plans), static_cast<uint32_t>(nonfinite_rounds));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const uint8_t>> CheckpointFile::Find(const std::string& name, TensorType type,
                                                              uint64_t bytes) const {
  const auto it = header_.entries.find(name);
  if (it == header_.entries.end() || it->second.type != type || it->second.bytes != bytes)
    return Damaged(absl::StrFormat("no tensor '%s' of %d bytes", name, bytes));
  return std::span(bytes_).subspan(header_.data_begin + it->second.begin, bytes);
}

bool CheckpointFile::Has(const std::string& kind, uint32_t tensor) const {
  return header_.entries.contains(absl::StrFormat("%s/%s", kind, job_->tensors()[tensor].name));
}

absl::Status CheckpointFile::Fill(const std::string& kind, uint32_t tensor, TensorMemory* memory,
                                  std::span<float> values) const {
  if (values.empty()) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(const auto bytes, Find(absl::StrFormat("%s/%s", kind, job_->tensors()[tensor].name),
                                             TensorType::kF32, values.size_bytes()));
  memory->Fill(values, [&](float* to) { std::memcpy(to, bytes.data(), bytes.size()); });
  return absl::OkStatus();
}

absl::Status CheckpointFile::RestoreForNewJob(Replica* replica, GradientStore* gradients) const {
  TensorMemory* const memory = &replica->memory();
  for (uint32_t t = 0; t < job_->tensors().size(); ++t)
    GW_RETURN_IF_ERROR(Fill(kParameter, t, memory, replica->parameter(t)));
  if (SameButName()) GW_RETURN_IF_ERROR(RestoreGradients(memory, gradients));
  memory->Wait();
  return absl::OkStatus();
}

absl::Status CheckpointFile::RestoreGradients(TensorMemory* memory, GradientStore* gradients) const {
  GW_ASSIGN_OR_RETURN(const auto steps, Find(kSteps, TensorType::kU32, job_->tensors().size() * 8));
  for (uint32_t t = 0; t < job_->tensors().size(); ++t) {
    const GradientStore::Memory kept = gradients->MemoryOf(t, Has(kResidual, t), Load<uint64_t>(&steps[8 * t]));
    GW_RETURN_IF_ERROR(Fill(kResidual, t, memory, kept.pending));
    GW_RETURN_IF_ERROR(Fill(kPreconditioner, t, memory, kept.second_moment));
    GW_RETURN_IF_ERROR(Fill(kVelocity, t, memory, kept.velocity));
  }
  return absl::OkStatus();
}

absl::Status CheckpointFile::Restore(Replica* replica, GradientStore* gradients) const {
  TensorMemory* const memory = &replica->memory();
  for (uint32_t t = 0; t < job_->tensors().size(); ++t) {
    if (identity_.pull != PullMode::kMean) GW_RETURN_IF_ERROR(Fill(kParameter, t, memory, replica->parameter(t)));
    GW_RETURN_IF_ERROR(Fill(kFirstMoment, t, memory, replica->first_moment(t)));
    GW_RETURN_IF_ERROR(Fill(kSecondMoment, t, memory, replica->second_moment(t)));
  }
  GW_RETURN_IF_ERROR(RestoreGradients(memory, gradients));
  memory->Wait();
  return absl::OkStatus();
}

}  // namespace gradwire::client
