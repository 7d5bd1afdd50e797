// Snapshots: whatever the manifest or a tensor file holds, the state that is loaded fits the job, or nothing is loaded.
#include <map>
#include <string>

#include "absl/strings/str_format.h"
#include "common/base/sha256.h"
#include "common/codec/plan/plan_check.h"
#include "common/snapshot/snapshot_files.h"
#include "common/storage/files.h"
#include "tests/fuzz/targets.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::fuzz {
namespace {

using Files = std::map<std::string, std::vector<uint8_t>>;

constexpr char kSnapshots[] = "/snapshots";
constexpr uint64_t kSnapshotVersion = 7;
constexpr const char* kNames[] = {"manifest.json", "parameters.safetensors", "state.safetensors"};

Job MakeJob() {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.set_codec("tagc:density=0.05");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.set_run_elements(256);
  spec.set_bucket_bytes(4096);
  for (const auto& [name, elements] : {std::pair("weight", 1500), std::pair("bias", 3)}) {
    spec.add_tensors()->set_name(name);
    spec.mutable_tensors(spec.tensors_size() - 1)->add_shape(static_cast<uint64_t>(elements));
  }
  return *Job::Make(spec);
}

struct Subject {
  const Job job = MakeJob();
  const Layout layout = *Layout::Make(job, 2);
  Files files;  // of a good snapshot of shard 1

  Subject() {
    ShardState state;
    state.version = kSnapshotVersion;
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      const BucketLayout& slice = layout.at(b, 1);
      const std::vector<float> values(slice.elements, 0.5f);
      const RoundPlan plan{std::vector<int8_t>(slice.runs.size(), -9), 1, 30, {}};
      state.buckets.push_back({PlanWindow(1, kSnapshotVersion, {plan}), 0, values, values, values, {}});
    }
    testing_support::FakeDisk disk;
    SnapshotFiles snapshots(&disk, kSnapshots, &job, &layout, 1);
    Require(snapshots.Write(state).ok(), "a snapshot can be written");
    for (const char* name : kNames) {
      files[name] = *ReadWholeFile(disk, SnapshotPath(kSnapshots, kSnapshotVersion) + "/" + name, 1 << 20);
    }
    // As those of before: a digest would refuse all others before they are looked at.
    std::vector<uint8_t>& manifest = files[kNames[0]];
    std::string text(manifest.begin(), manifest.end());
    const size_t line = text.find("  \"manifest_sha256\"");
    Require(line != std::string::npos, "a manifest has a digest");
    text.erase(line, text.find('\n', line) + 1 - line);
    manifest.assign(text.begin(), text.end());
  }
};

const Subject& TheSubject() {
  static const Subject* const subject = new Subject;
  return *subject;
}

std::string DigestOf(const std::vector<uint8_t>& bytes) {
  Sha256 sha;
  sha.Update(std::span<const uint8_t>(bytes));
  return sha.Hex();
}

// Puts `bytes` in the place of a file. A tensor file keeps the manifest's consent.
void Replace(const char* name, Input bytes, Files* files) {
  std::vector<uint8_t>& file = (*files)[name];
  const std::string before = DigestOf(file);
  file.assign(bytes.begin(), bytes.end());
  std::vector<uint8_t>& manifest = (*files)[kNames[0]];
  std::string text(manifest.begin(), manifest.end());
  const size_t at = text.find(before);
  if (at != std::string::npos) text.replace(at, before.size(), DigestOf(file));
  manifest.assign(text.begin(), text.end());
}

}  // namespace

// u8 which file (modulo 3), its bytes.
void RunSnapshot(Input input) {
  Reader reader(input);
  const Subject& subject = TheSubject();
  Files files = subject.files;
  Replace(kNames[reader.Take<uint8_t>() % std::size(kNames)], reader.rest(), &files);
  testing_support::FakeDisk disk;
  Require(disk.CreateDirectory(kSnapshots).ok(), "the fake disk takes directories");
  for (const auto& [name, bytes] : files) {
    Require(WriteFileAtomically(disk, kSnapshots, name, bytes).ok(), "the fake disk takes files");
  }
  const absl::StatusOr<SnapshotManifest> manifest = ReadManifest(disk, kSnapshots);
  if (manifest.ok()) {
    const absl::StatusOr<Job> job = JobOf(*manifest);
    Require(!job.ok() || absl::StrFormat("%016x", job->digest()) == manifest->job_digest, "the job is the one it says");
  }
  const absl::StatusOr<ShardState> state = LoadSnapshot(disk, kSnapshots, subject.job, subject.layout, 1);
  if (!state.ok()) return;
  Require(manifest.ok() && state->version == manifest->version, "the version is the manifest's");
  Require(state->buckets.size() == subject.layout.bucket_count(), "all buckets are there");
  for (uint32_t b = 0; b < state->buckets.size(); ++b) {
    const BucketLayout& slice = subject.layout.at(b, 1);
    const ShardState::Bucket& bucket = state->buckets[b];
    Require(bucket.parameter.size() == slice.elements && bucket.second_moment.size() == slice.elements,
            "arrays are as long as the slice");
    for (uint64_t age = 0; const RoundPlan& plan : bucket.plans.newest_first())
      Require(CheckPlan(subject.job, slice, bucket.plans.version() - age++, plan).ok(), "the plan fits");
  }
}

Seeds SnapshotSeeds() {
  Seeds seeds;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    std::vector<uint8_t>& seed = seeds.emplace_back(1, static_cast<uint8_t>(i));
    const std::vector<uint8_t>& bytes = TheSubject().files.at(kNames[i]);
    seed.insert(seed.end(), bytes.begin(), bytes.end());
  }
  return seeds;
}

}  // namespace gradwire::fuzz
