// The file of a worker's state: what is written comes back, and nothing else is taken for it.
#include "client/cpp/internal/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "common/job/norms.h"
#include "common/storage/files.h"
#include "kernels/backend.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::client {
namespace {

using ::testing::HasSubstr;

constexpr char kPath[] = "/run/worker.checkpoint";
constexpr uint32_t kShards = 2;

v1::JobSpec SpecFor(v1::PushKind push) {
  v1::JobSpec spec;
  spec.set_name("unit");
  for (const char* name : {"a.weight", "b.weight", "residual/b.weight", "empty"}) {
    spec.add_tensors()->set_name(name);
    spec.mutable_tensors(spec.tensors_size() - 1)
        ->add_shape(spec.tensors_size() == 4 ? 0 : 100 * static_cast<uint64_t>(spec.tensors_size()));
  }
  spec.mutable_optimizer()->set_kind(push == v1::PUSH_STEP ? v1::OPTIMIZER_STEP : v1::OPTIMIZER_ADAMW);
  spec.set_push(push);
  spec.set_codec(push == v1::PUSH_STEP ? "tagc:density=0.1" : "dgc:density=0.1");
  v1::CodecRule* rule = spec.add_rules();
  rule->set_pattern("a.*");
  rule->set_codec("dense:values=fp32");
  spec.set_run_elements(64);
  if (push == v1::PUSH_STEP) spec.set_nonfinite(v1::NONFINITE_SKIP);
  return spec;
}

// A worker without connections: what it would have between two rounds.
struct State {
  explicit State(const v1::JobSpec& spec, uint32_t shards = kShards)
      : job(*Job::Make(spec)), layout(*Layout::Make(job, shards)), backend(*kernels::MakeBackend("reference")) {
    std::vector<std::span<float>> spans;
    for (const Tensor& tensor : job.tensors()) memory.emplace_back(tensor.elements);
    for (auto& tensor : memory) spans.emplace_back(tensor);
    std::vector<const Codec*> of_tensor(job.tensors().size());
    for (const BucketLayout& slice : layout.slices()) {
      codecs.push_back(*MakeCodec({&job, &slice, backend.get()}));
      for (const BucketPart& part : layout.parts(slice.job_bucket)) of_tensor[part.tensor] = codecs.back().get();
    }
    for (const auto& codec : codecs) plans.emplace_back(1, 42, std::deque<RoundPlan>{codec->InitialPlan()});
    replica = std::make_unique<Replica>(&job, &layout, MakeHostMemory(backend.get()), spans, true);
    gradients = std::make_unique<GradientStore>(&job, of_tensor, MakeHostMemory(backend.get()));
  }

  void Randomise() {
    std::mt19937 random(7);
    const auto fill = [&random](std::span<float> values) {
      for (float& x : values) x = std::normal_distribution<float>(0, 1)(random);
    };
    for (uint32_t t = 0; t < job.tensors().size(); ++t) {
      fill(replica->parameter(t));
      fill(replica->first_moment(t));
      fill(replica->second_moment(t));
      const GradientStore::Memory kept = gradients->MemoryOf(t, true, 0x1'0000'0007);
      fill(kept.pending);
      fill(kept.second_moment);
      fill(kept.velocity);
    }
    for (PlanWindow& window : plans) {
      std::deque<RoundPlan> changed = window.newest_first();
      for (RoundPlan& plan : changed)
        for (int8_t& e : plan.exponents) e = static_cast<int8_t>(-20 + static_cast<int>(random() % 10));
      window = PlanWindow(1, 42, changed, SkipsNonFinite(job) ? 3 : 0);
    }
  }

  CheckpointIdentity Identity() const {
    return {"worker-3",
            0xFEDCBA9876543210,
            42,
            PullMode::kUpdate,
            {7, 0x1'0000'0001},
            {5, 0xFEDCBA9876543210},
            {{"had_gradients", "101"}, {"empty", ""}},
            {9, 0xFEDCBA9876543210}};
  }
  absl::Status Write(Disk& disk) const { return Write(disk, Identity()); }
  absl::Status Write(Disk& disk, const CheckpointIdentity& identity) const {
    return WriteCheckpoint(disk, kPath, job, layout, identity, *replica, *gradients, plans);
  }
  absl::StatusOr<CheckpointFile> Read(Disk& disk, const std::string& worker = "worker-3",
                                      PullMode pull = PullMode::kUpdate) const {
    return CheckpointFile::Read(disk, kPath, job, layout, worker, pull);
  }

  Job job;
  Layout layout;
  std::unique_ptr<kernels::Backend> backend;
  std::vector<std::vector<float>> memory;
  std::vector<std::unique_ptr<Codec>> codecs;
  std::vector<PlanWindow> plans;
  std::unique_ptr<Replica> replica;
  std::unique_ptr<GradientStore> gradients;
};

std::vector<float> Copy(std::span<const float> values) { return {values.begin(), values.end()}; }

class CheckpointOnDisk : public ::testing::Test {
 protected:
  CheckpointOnDisk() { EXPECT_TRUE(disk_.CreateDirectory("/run").ok()); }
  testing_support::FakeDisk disk_;
};

class CheckpointTest : public CheckpointOnDisk, public ::testing::WithParamInterface<v1::PushKind> {};

TEST_P(CheckpointTest, ComesBackWhole) {
  State from(SpecFor(GetParam())), to(SpecFor(GetParam()));
  from.Randomise();
  ASSERT_EQ(from.Write(disk_), absl::OkStatus());
  const auto file = to.Read(disk_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->identity().worker, "worker-3");
  EXPECT_EQ(file->identity().incarnation, 0xFEDCBA9876543210);
  EXPECT_EQ(file->identity().version, 42u);
  EXPECT_EQ(file->identity().server_epochs, (std::vector<uint64_t>{7, 0x1'0000'0001}));
  EXPECT_EQ(file->identity().server_lineages, (std::vector<uint64_t>{5, 0xFEDCBA9876543210}));
  EXPECT_EQ(file->identity().notes, from.Identity().notes);
  EXPECT_EQ(file->identity().job_instances, from.Identity().job_instances);
  EXPECT_EQ(file->plans(), from.plans);
  ASSERT_EQ(file->Restore(to.replica.get(), to.gradients.get()), absl::OkStatus());
  EXPECT_EQ(to.memory, from.memory);
  for (uint32_t t = 0; t < from.job.tensors().size(); ++t) {
    EXPECT_EQ(Copy(to.replica->first_moment(t)), Copy(from.replica->first_moment(t)));
    EXPECT_EQ(Copy(to.replica->second_moment(t)), Copy(from.replica->second_moment(t)));
    const GradientStore::Kept found = to.gradients->KeptOf(t), wanted = from.gradients->KeptOf(t);
    EXPECT_EQ(Copy(found.pending.values), Copy(wanted.pending.values)) << t;
    EXPECT_EQ(Copy(found.second_moment.values), Copy(wanted.second_moment.values));
    EXPECT_EQ(Copy(found.velocity.values), Copy(wanted.velocity.values));
    EXPECT_EQ(wanted.velocity.values.size(),
              GetParam() == v1::PUSH_GRADIENT && (t == 1 || t == 2) ? from.memory[t].size() : 0);
    EXPECT_EQ(found.steps, wanted.steps);
  }
}

TEST_P(CheckpointTest, AnyOtherByteIsFound) {
  State state(SpecFor(GetParam()));
  state.Randomise();
  ASSERT_EQ(state.Write(disk_), absl::OkStatus());
  const std::vector<uint8_t> whole = *ReadWholeFile(disk_, kPath, 1 << 30);
  const auto write = [this](std::span<const uint8_t> bytes) {
    ASSERT_EQ(WriteFileAtomically(disk_, "/run", "worker.checkpoint", bytes), absl::OkStatus());
  };
  const uint64_t step = std::max<size_t>(1, whole.size() / 997);  // some of every part
  for (size_t at = 0; at < whole.size(); at += step) {
    std::vector<uint8_t> other = whole;
    other[at] ^= 0x10;
    write(other);
    EXPECT_FALSE(state.Read(disk_).ok()) << "byte " << at;
  }
  for (size_t bytes : {size_t{0}, size_t{7}, size_t{100}, whole.size() - 1}) {
    write(std::span(whole).first(bytes));
    EXPECT_EQ(state.Read(disk_).status().code(), absl::StatusCode::kDataLoss) << bytes;
  }
}

INSTANTIATE_TEST_SUITE_P(Pushes, CheckpointTest, ::testing::Values(v1::PUSH_GRADIENT, v1::PUSH_STEP));

TEST_F(CheckpointOnDisk, IsRefusedWhereItIsAnothers) {
  State state(SpecFor(v1::PUSH_GRADIENT));
  EXPECT_EQ(state.Read(disk_).status().code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(state.Write(disk_), absl::OkStatus());
  const auto refusal = [](const absl::StatusOr<CheckpointFile>& read) {
    EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition) << read.status();
    return std::string(read.status().message());
  };
  EXPECT_THAT(refusal(state.Read(disk_, "worker-4")), AllOf(HasSubstr("'worker-3'"), HasSubstr("'worker-4'")));
  EXPECT_THAT(refusal(state.Read(disk_, "worker-3", PullMode::kParams)), HasSubstr("pull mode 'update'"));
  EXPECT_THAT(refusal(State(SpecFor(v1::PUSH_GRADIENT), 3).Read(disk_)), HasSubstr("shard map"));
  v1::JobSpec other = SpecFor(v1::PUSH_GRADIENT);
  other.set_seed(9);
  EXPECT_THAT(refusal(State(other).Read(disk_)), HasSubstr("spec"));
  other.set_name("unit-2");
  EXPECT_THAT(refusal(State(other).Read(disk_)), HasSubstr("job 'unit'"));
}

TEST_F(CheckpointOnDisk, NotesThatNobodyCouldReadAreRefusedAndTheFileStays) {
  State state(SpecFor(v1::PUSH_GRADIENT));
  CheckpointIdentity identity = state.Identity();
  const uint64_t most = (1 << 20) - std::string("note").size();
  identity.notes = {{"note", std::string(most, '\x01')}};  // what JSON writes as six characters
  ASSERT_EQ(state.Write(disk_, identity), absl::OkStatus());
  EXPECT_EQ(state.Read(disk_)->identity().notes, identity.notes);
  const std::map<std::string, std::string> good = {{"emoji \xF0\x9F\x8E\x89", "line\nfeed \xEF\xBF\xBD"}};
  identity.notes = good;
  ASSERT_EQ(state.Write(disk_, identity), absl::OkStatus());
  const auto refusal = [&](std::map<std::string, std::string> notes) {
    identity.notes = std::move(notes);
    const absl::Status refused = state.Write(disk_, identity);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    const auto file = state.Read(disk_);
    EXPECT_TRUE(file.ok() && file->identity().notes == good) << file.status();
    return std::string(refused.message());
  };
  EXPECT_THAT(refusal({{"note", std::string(most + 1, 'x')}}), HasSubstr("1048577 bytes; 1048576 are allowed"));
  for (const char* text : {"\xFF", "cut \xF0\x9F\x8E", "\xC0\x80", "surrogate \xED\xA0\x80", "\x80"}) {
    EXPECT_THAT(refusal({{"fine", ""}, {"note", text}}), HasSubstr("note 'note'")) << text;
    EXPECT_THAT(refusal({{text, "value"}}), HasSubstr("UTF-8"));
  }
}

TEST_F(CheckpointOnDisk, AFullDiskKeepsTheOneBeforeAndNothingElse) {
  State state(SpecFor(v1::PUSH_GRADIENT));
  ASSERT_EQ(state.Write(disk_), absl::OkStatus());
  disk_.set_capacity(disk_.TotalBytes() * 3 / 2);
  EXPECT_EQ(state.Write(disk_).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(disk_.Files(), std::vector<std::string>{kPath});
  EXPECT_EQ(WriteFileAtomically(disk_, "/run", "other", std::vector<uint8_t>(disk_.TotalBytes())).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(disk_.Files(), std::vector<std::string>{kPath});
  EXPECT_TRUE(state.Read(disk_).ok());
  disk_.set_capacity(UINT64_MAX);
  disk_.set_sync_error(absl::DataLossError("input/output error"));
  EXPECT_FALSE(state.Write(disk_).ok());
  EXPECT_EQ(disk_.Files(), std::vector<std::string>{kPath});
}

TEST_F(CheckpointOnDisk, SafetensorsFileOfSomethingElseIsNone) {
  State state(SpecFor(v1::PUSH_GRADIENT));
  std::vector<TensorEntry> none;
  ASSERT_EQ(WriteFileAtomically(disk_, "/run", "worker.checkpoint", MakeSafetensorsHeader(&none, {{"format", "pt"}})),
            absl::OkStatus());
  EXPECT_EQ(state.Read(disk_).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire::client
