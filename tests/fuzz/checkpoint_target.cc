// Checkpoints of workers: whatever a file holds, what is taken from it fits the job and can be written again, or
// nothing is taken.
#include <cstring>
#include <deque>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "client/cpp/internal/checkpoint.h"
#include "common/base/sha256.h"
#include "common/codec/plan/plan_check.h"
#include "common/storage/files.h"
#include "kernels/backend.h"
#include "tests/fuzz/targets.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::fuzz {
namespace {

constexpr char kFolder[] = "/run";
constexpr char kFile[] = "worker.checkpoint";
constexpr char kPath[] = "/run/worker.checkpoint";
constexpr char kWorker[] = "worker-3";
constexpr uint64_t kVersion = 42;
constexpr uint32_t kShards = 2;
constexpr char kDigestKey[] = "sha256";

v1::JobSpec SpecOf(uint8_t choice) {
  const bool step = (choice & 1) != 0;
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_optimizer()->set_kind(step ? v1::OPTIMIZER_STEP : v1::OPTIMIZER_ADAMW);
  if (step) spec.set_push(v1::PUSH_STEP);
  spec.set_codec(!step && (choice & 4) != 0 ? "dgc:density=0.2" : "tagc:density=0.2");
  for (const auto& [name, elements] : {std::pair("a.weight", 40), std::pair("b", 7), std::pair("empty", 0)}) {
    spec.add_tensors()->set_name(name);
    spec.mutable_tensors(spec.tensors_size() - 1)->add_shape(static_cast<uint64_t>(elements));
  }
  v1::CodecRule* rule = spec.add_rules();
  rule->set_pattern("b");
  rule->set_codec("dense:values=fp32");
  spec.set_run_elements(64);
  if ((choice & 2) != 0) {
    spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
    spec.mutable_rounds()->set_staleness(2);
  }
  return spec;
}

// A worker of the job, without connections.
struct State {
  explicit State(uint8_t choice)
      : job(*Job::Make(SpecOf(choice))),
        layout(*Layout::Make(job, kShards)),
        backend(*kernels::MakeBackend("reference")) {
    std::vector<std::span<float>> spans;
    for (const Tensor& tensor : job.tensors()) memory.emplace_back(tensor.elements, 0.5f);
    for (std::vector<float>& tensor : memory) spans.emplace_back(tensor);
    std::vector<const Codec*> of_tensor(job.tensors().size());
    for (const BucketLayout& slice : layout.slices()) {
      codecs.push_back(*MakeCodec({&job, &slice, backend.get()}));
      for (const BucketPart& part : layout.parts(slice.job_bucket)) of_tensor[part.tensor] = codecs.back().get();
    }
    for (const auto& codec : codecs) {
      plans.emplace_back(PlansKept(job), kVersion, std::deque<RoundPlan>(PlansKept(job), codec->InitialPlan()));
    }
    replica = std::make_unique<client::Replica>(&job, &layout, client::MakeHostMemory(backend.get()), spans, true);
    gradients = std::make_unique<client::GradientStore>(&job, of_tensor, client::MakeHostMemory(backend.get()));
  }
  absl::Status Write(Disk& disk, const client::CheckpointIdentity& identity) const {
    return client::WriteCheckpoint(disk, kPath, job, layout, identity, *replica, *gradients, plans);
  }
  absl::StatusOr<client::CheckpointFile> Read(Disk& disk) const {
    return client::CheckpointFile::Read(disk, kPath, job, layout, kWorker, PullMode::kUpdate);
  }

  const Job job;
  const Layout layout;
  std::unique_ptr<kernels::Backend> backend;
  std::vector<std::vector<float>> memory;
  std::vector<std::unique_ptr<Codec>> codecs;
  std::vector<PlanWindow> plans;
  std::unique_ptr<client::Replica> replica;
  std::unique_ptr<client::GradientStore> gradients;
};

void MakeFolder(Disk& disk) { Require(disk.CreateDirectory(kFolder).ok(), "the fake disk takes directories"); }

std::vector<uint8_t> FileOf(Input header, Input tensors) {
  std::vector<uint8_t> file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<uint8_t>(uint64_t{header.size()} >> (8 * i)));
  file.insert(file.end(), header.begin(), header.end());
  file.insert(file.end(), tensors.begin(), tensors.end());
  return file;
}

// Puts the digest that CHECKPOINT.md asks for in the place of the one that the header names.
void RepairDigest(Input tensors, std::vector<uint8_t>* text) {
  const std::vector<uint8_t> file = FileOf(*text, tensors);
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(file, file.size());
  if (!header.ok() || !header->metadata.contains(kDigestKey)) return;
  std::string content;
  for (const auto& [key, value] : header->metadata) {
    if (key != kDigestKey) absl::StrAppendFormat(&content, "%s=%s\n", key, value);
  }
  for (const auto& [name, entry] : header->entries) {
    absl::StrAppendFormat(&content, "%s:%d\n", name, entry.bytes);
    content.append(reinterpret_cast<const char*>(tensors.data()) + entry.begin, entry.bytes);
  }
  Sha256 sha;
  sha.Update({reinterpret_cast<const uint8_t*>(content.data()), content.size()});
  std::string repaired(text->begin(), text->end());
  const std::string& named = header->metadata.at(kDigestKey);
  const size_t at = named.empty() ? std::string::npos : repaired.find(named);
  if (at == std::string::npos) return;
  repaired.replace(at, named.size(), sha.Hex());
  text->assign(repaired.begin(), repaired.end());
}

}  // namespace

// u8: bit 0 the digest is made right first, bits 1 to 3 which job; u16 bytes of tensors; header without its length,
// tensors.
void RunCheckpoint(Input input) {
  Reader reader(input);
  const uint8_t choice = reader.Take<uint8_t>();
  const size_t tensor_bytes = reader.Take<uint16_t>();
  const Input rest = reader.rest();
  const Input tensors = rest.last(std::min(tensor_bytes, rest.size()));
  const Input header = rest.first(rest.size() - tensors.size());
  std::vector<uint8_t> text(header.begin(), header.end());
  if ((choice & 1) != 0) RepairDigest(tensors, &text);
  testing_support::FakeDisk disk;
  MakeFolder(disk);
  Require(WriteFileAtomically(disk, kFolder, kFile, FileOf(text, tensors)).ok(), "the fake disk takes files");
  State state(static_cast<uint8_t>(choice >> 1));
  const absl::StatusOr<client::CheckpointFile> file = state.Read(disk);
  if (!file.ok()) return;
  Require(file->identity().worker == kWorker && file->identity().server_epochs.size() == kShards,
          "it is this worker's");
  Require(file->plans().size() == state.codecs.size(), "there is a plan for every slice");
  for (size_t i = 0; i < file->plans().size(); ++i) {
    const BucketLayout& slice = state.layout.slices()[i];
    Require(file->plans()[i].version() == file->identity().version, "plans are of the version");
    for (uint64_t age = 0; const RoundPlan& plan : file->plans()[i].newest_first()) {
      Require(CheckPlan(state.job, slice, file->plans()[i].version() - age++, plan).ok(), "plans fit");
    }
  }
  if (!file->Restore(state.replica.get(), state.gradients.get()).ok()) return;
  state.plans = file->plans();
  Require(state.Write(disk, file->identity()).ok(), "what was restored can be written");
  const absl::StatusOr<client::CheckpointFile> again = state.Read(disk);
  Require(again.ok() && again->identity().version == file->identity().version &&
              again->identity().incarnation == file->identity().incarnation &&
              again->Restore(state.replica.get(), state.gradients.get()).ok(),
          "and is read again");
}

Seeds CheckpointSeeds() {
  Seeds seeds;
  for (uint8_t choice = 0; choice < 16; ++choice) {
    testing_support::FakeDisk disk;
    MakeFolder(disk);
    const State state(static_cast<uint8_t>(choice >> 1));
    Require(state.Write(disk, {kWorker, 0xABCD, kVersion, PullMode::kUpdate, {7, 8}, {11, 12}, {{"note", "1"}}}).ok(),
            "a checkpoint can be written");
    const std::vector<uint8_t> file = *ReadWholeFile(disk, kPath, 1 << 20);
    uint64_t header_bytes;
    std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
    const size_t tensor_bytes = file.size() - 8 - header_bytes;
    std::vector<uint8_t>& seed = seeds.emplace_back();
    seed = {choice, static_cast<uint8_t>(tensor_bytes), static_cast<uint8_t>(tensor_bytes >> 8)};
    seed.insert(seed.end(), file.begin() + 8, file.end());
  }
  return seeds;
}

}  // namespace gradwire::fuzz
