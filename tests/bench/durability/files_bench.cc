// Reading journals and snapshots again; see durability_bench.h.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/snapshot/snapshot_files.h"
#include "common/storage/data_directory.h"
#include "common/storage/files.h"
#include "common/storage/posix_disk.h"
#include "kernels/backend.h"
#include "server/journal/job_journal.h"
#include "tests/bench/durability/durability_bench.h"

namespace gradwire::bench {
namespace {

constexpr int kReplayedRounds = 12;

uint64_t FileBytes(const std::string& directory) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) bytes += entry.file_size();
  }
  return bytes;
}

// The next reader gets them from the disk.
void DropFromCache(const std::string& directory) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) {
      Check(absl::ErrnoToStatus(errno, entry.path().string()));
    }
    close(fd);
  }
}

// As a server that starts: everything from the files to a job that may be joined.
double Replay(const std::string& data) {
  const std::unique_ptr<kernels::Backend> backend = Take(kernels::MakeBackend("auto"));
  PosixDisk disk;
  SteadyClock clock;
  const auto directory = Take(DataDirectory::Open(&disk, data));
  const v1::StoredJob stored = Take(directory->LoadJob(BenchTraining::kJob));
  JobEnvironment environment;
  environment.backend = backend.get();
  environment.clock = &clock;
  environment.frame_limit_bytes = 1ull << 30;
  environment.job_memory_limit_bytes = 1ull << 40;
  const auto shard = Take(JobShard::Make(stored.spec(), 0, 1, environment));
  const JournalUse use{false, 64 * kMiB, {}};
  const double seconds = Seconds([&] { Check(OpenJournal(*directory, *shard, &clock, use).status()); });
  shard->log().Stop();
  return seconds;
}

}  // namespace

void MeasureReplay(const DurabilityConfig& config, Report* report) {
  const std::pair<const char*, const char*> codecs[] = {{"TAGC 1 %", "tagc:density=0.01"},
                                                        {"dense", "dense:values=fp32"}};
  std::vector<std::string> data;
  for (const auto& [name, codec] : codecs) {
    data.push_back(absl::StrCat(config.directory, "/replay-", name));
    BenchTraining training(data.back(), codec, v1::OPTIMIZER_STEP, config.bytes, v1::DURABILITY_INTERVAL);
    training.Rounds(kReplayedRounds);
  }
  std::vector<std::function<double()>> runs;
  for (const std::string& path : data) runs.push_back([&path] { return Replay(path); });
  const auto seconds = Interleave(config.rounds, runs);
  const double dense_gb = 1e-9 * kReplayedRounds * static_cast<double>(config.bytes);
  for (size_t i = 0; i < data.size(); ++i) {
    const double frames_gb = 1e-9 * static_cast<double>(FileBytes(data[i] + "/jobs"));
    const std::string label = absl::StrCat("replay of ", codecs[i].first);
    report->Add({label + ", bytes of the journal", frames_gb / Median(seconds[i]), "GB/s", {}, "", {}});
    const double dense = dense_gb / Median(seconds[i]);
    report->Add({label + ", dense-equivalent", dense, "GB/s", dense, "1 GB/s", kReplayTarget});
  }
}

void MeasureLoad(const DurabilityConfig& config, Report* report) {
  v1::JobSpec spec;
  spec.set_name("load");
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  for (int i = 0; i < 8; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("layer", i, ".weight"));
    tensor->add_shape(config.bytes / 8 / sizeof(float));
  }
  const Job job = Take(Job::Make(spec));
  const Layout layout = Take(Layout::Make(job, 1));
  ShardState state;
  state.version = 7;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const std::vector<float> values(layout.at(b, 0).elements, 0.5f);
    state.buckets.push_back({PlanWindow(1, state.version, {RoundPlan()}), 0, values, values, values, {}});
  }
  PosixDisk disk;
  const std::string directory = config.directory + "/snapshots";
  SnapshotFiles files(&disk, directory, &job, &layout, 0);
  const double written = Seconds([&] { Check(files.Write(state)); });
  const double gb = 1e-9 * static_cast<double>(FileBytes(directory));
  report->Add({"snapshot written and synced", gb / written, "GB/s", {}, "", {}});
  const std::string path = SnapshotPath(directory, state.version);
  const auto raw = [&] {
    return Seconds([&] {
      for (const char* name : {"parameters.safetensors", "state.safetensors"}) {
        Take(ReadWholeFile(disk, absl::StrCat(path, "/", name), 1ull << 40));
      }
    });
  };
  const auto load = [&] { return Seconds([&] { Take(files.Load(state.version)); }); };
  const auto cold = [&](const std::function<double()>& run) { return DropFromCache(directory), run(); };
  const auto seconds = Interleave(config.rounds, {[&] { return cold(raw); }, [&] { return cold(load); }, raw, load});
  report->Add({"snapshot files read from the disk", gb / Median(seconds[0]), "GB/s", {}, "", {}});
  report->Add({"snapshot loaded from the disk", gb / Median(seconds[1]), "GB/s", MedianRatio(seconds[0], seconds[1]),
               "read from the disk", kLoadTarget});
  report->Add({"snapshot files read from the page cache", gb / Median(seconds[2]), "GB/s", {}, "", {}});
  report->Add({"snapshot loaded from the page cache",
               gb / Median(seconds[3]),
               "GB/s",
               MedianRatio(seconds[2], seconds[3]),
               "read from the cache",
               {}});
}

}  // namespace gradwire::bench
