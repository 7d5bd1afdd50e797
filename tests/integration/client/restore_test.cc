// A job moves to another number of servers, real processes all: `gradwire snapshot`, `verify` and `restore`, and the
// very digest of a run that stayed where it was.
#include <barrier>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_join.h"
#include "tests/integration/client/cluster.h"
#include "tests/integration/client/server_processes.h"
#include "tests/lib/temporary_folder.h"

namespace gradwire::testing {
namespace {

constexpr int kWorkers = 2;
constexpr uint64_t kFirstSteps = 20;
constexpr uint64_t kAllSteps = 40;

struct Output {
  int exit_code = -1;
  std::string text;
};

Output RunCli(const std::string& arguments) {
  Output output;
  std::FILE* pipe = popen((std::string(GRADWIRE_CLI_BINARY) + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return output;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.text.append(buffer, n);
  output.exit_code = WEXITSTATUS(pclose(pipe));
  return output;
}

// New workers do steps [first, last); returns the digest of their replicas. `half_way` is called while no round is
// open.
std::string Train(const v1::JobSpec& spec, const std::vector<std::string>& servers, uint64_t first, uint64_t last,
                  const std::function<void()>& half_way = {}) {
  std::vector<std::string> digests(kWorkers);
  std::barrier meeting(kWorkers);
  InParallel(kWorkers, [&](int w) {
    Worker worker(spec, w);
    const absl::Status joined = worker.Join(servers);
    EXPECT_TRUE(joined.ok()) << joined;
    for (uint64_t step = first; step < last && joined.ok(); ++step) {
      if (half_way && step == (first + last) / 2) {
        meeting.arrive_and_wait();
        if (w == 0) half_way();
        meeting.arrive_and_wait();
      }
      worker.Fill(step);
      const bool bad = spec.nonfinite() == v1::NONFINITE_SKIP && step % 5 == 3 && w == static_cast<int>(step % 2);
      if (bad) worker.gradients()[5][0] = std::numeric_limits<float>::quiet_NaN();
      const absl::Status stepped = worker.Step(0.01f);
      EXPECT_TRUE(stepped.ok()) << "worker " << w << " step " << step << ": " << stepped;
      if (!stepped.ok()) break;
    }
    if (!joined.ok()) return;
    EXPECT_EQ(worker.session().version(), last + 1);
    digests[w] = worker.session().Digest();
    meeting.arrive_and_wait();  // nobody leaves before everybody is through
  });
  EXPECT_EQ(digests[0], digests[1]);
  return digests[0];
}

class Restored : public ::testing::Test {
 protected:
  std::vector<std::string> Directories(const std::string& name, int count) const {
    std::vector<std::string> directories;
    for (int i = 0; i < count; ++i) directories.push_back(absl::StrCat(root_.path(), "/", name, "-", i));
    return directories;
  }

  // Trains the first steps on four servers, with a snapshot half way, kills them, restores onto `shards` and trains
  // the rest there. Returns the digest.
  std::string TrainAndMove(const v1::JobSpec& spec, const std::vector<int>& onto, std::vector<std::string>* moved) {
    const std::vector<std::string> old = Directories(spec.name(), 4);
    std::string first;
    {
      ServerProcesses servers(old);
      first = Train(spec, servers.addresses(), 0, kFirstSteps, [&] {
        const Output taken =
            RunCli(absl::StrCat("snapshot ", spec.name(), " --servers=", absl::StrJoin(servers.addresses(), ",")));
        EXPECT_EQ(taken.exit_code, 0) << taken.text;
      });
      const Output beside = RunCli("verify " + old[0]);
      EXPECT_EQ(beside.exit_code, 0) << beside.text;
      EXPECT_NE(beside.text.find("a server runs here"), std::string::npos) << beside.text;
    }  // SIGKILL
    const Output verified = RunCli("verify " + absl::StrJoin(old, " "));
    EXPECT_EQ(verified.exit_code, 0) << verified.text;
    EXPECT_NE(verified.text.find(absl::StrCat("version ", kFirstSteps + 1)), std::string::npos) << verified.text;
    for (const int shards : onto) {
      const std::vector<std::string> to = Directories(absl::StrCat(spec.name(), "-on-", shards), shards);
      const Output restored =
          RunCli(absl::StrCat("restore --from=", absl::StrJoin(old, ","), " --to=", absl::StrJoin(to, ",")));
      EXPECT_EQ(restored.exit_code, 0) << restored.text;
      ServerProcesses servers(to);
      moved->push_back(Train(spec, servers.addresses(), kFirstSteps, kAllSteps));
    }
    return first;
  }

  const testing_support::TemporaryFolder root_{"restored"};
};

class RestoredJob : public Restored, public ::testing::WithParamInterface<std::pair<std::string, v1::OptimizerKind>> {};

TEST_P(RestoredJob, OnThreeServersGoesOnAsOnFour) {
  v1::JobSpec spec = MakeSpec(GetParam().first, "dense:values=fp32", GetParam().second, kWorkers);
  if (GetParam().second == v1::OPTIMIZER_LANS) spec.set_clip_norm(1);
  if (GetParam().first == "skips") spec.set_nonfinite(v1::NONFINITE_SKIP);
  std::string stayed;
  {
    Cluster cluster(4, "inproc");
    stayed = Train(spec, cluster.addresses(), 0, kAllSteps);
  }
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  std::vector<std::string> moved;
  const std::string first = TrainAndMove(spec, {3, 1}, &moved);
  EXPECT_EQ(moved, std::vector<std::string>(2, stayed));
  EXPECT_NE(first, stayed);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, RestoredJob,
                         ::testing::Values(std::pair{"adamw", v1::OPTIMIZER_ADAMW},
                                           std::pair{"lans", v1::OPTIMIZER_LANS},
                                           std::pair{"skips", v1::OPTIMIZER_ADAMW}),
                         [](const auto& info) { return info.param.first; });

// Residuals live in the worker processes, which are new here: the run to compare with has new ones, too.
TEST_F(Restored, CompressedStepsOnThreeServersGoOnAsOnFour) {
  v1::JobSpec spec = MakeSpec("tagc", "tagc:density=0.05,form=sketch,slack=4", v1::OPTIMIZER_STEP, kWorkers);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  std::vector<std::string> moved;
  TrainAndMove(spec, {4, 3}, &moved);
  ASSERT_EQ(moved.size(), 2u);
  EXPECT_EQ(moved[0], moved[1]);
}

// Runs are as long on any number of shards.
TEST_F(Restored, TablesOnThreeServersAndOnOneGoOnAsOnFour) {
  v1::JobSpec spec = MakeSpec("tables", "zen", v1::OPTIMIZER_ADAMW, kWorkers);
  spec.set_run_elements(4096);
  spec.set_bucket_bytes(64 << 10);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  std::vector<std::string> moved;
  TrainAndMove(spec, {4, 3, 1}, &moved);
  EXPECT_EQ(moved, std::vector<std::string>(3, moved[0]));
}

TEST_F(Restored, DamageIsNamedAndEndsWithOne) {
  v1::JobSpec spec = MakeSpec("damaged", "dense:values=fp32", v1::OPTIMIZER_ADAMW, kWorkers);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  const std::vector<std::string> old = Directories("damaged", 1);
  {
    ServerProcesses servers(old);
    Train(spec, servers.addresses(), 0, 4);
  }
  const std::string segment = old[0] + "/jobs/damaged.job/journal/00000000000000000001.journal";
  std::FILE* file = std::fopen(segment.c_str(), "r+b");
  ASSERT_NE(file, nullptr);
  std::fseek(file, static_cast<long>(std::filesystem::file_size(segment) / 2), SEEK_SET);
  std::fwrite("damage", 1, 6, file);
  std::fclose(file);
  const Output verified = RunCli("verify " + old[0]);
  EXPECT_EQ(verified.exit_code, 1) << verified.text;
  for (const std::string& expected : {segment, std::string("lost       versions"), std::string("gradwire restore")}) {
    EXPECT_NE(verified.text.find(expected), std::string::npos) << verified.text;
  }
  EXPECT_EQ(RunCli("verify --json " + old[0]).exit_code, 1);
  EXPECT_EQ(RunCli("verify " + root_.path()).exit_code, 1);
  EXPECT_EQ(RunCli("restore --from=" + old[0]).exit_code, 2);
}

}  // namespace
}  // namespace gradwire::testing
