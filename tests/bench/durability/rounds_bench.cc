// Training while journals and snapshots are written; see durability_bench.h.
#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/bench/durability/durability_bench.h"

namespace gradwire::bench {
namespace {

constexpr size_t kSmallBytes = 4096;
constexpr size_t kBucketBytes = 4 * kMiB;

struct Level {
  const char* name;
  v1::DurabilityLevel level;
};
constexpr Level kLevels[] = {
    {"none", v1::DURABILITY_NONE}, {"interval", v1::DURABILITY_INTERVAL}, {"fsync", v1::DURABILITY_FSYNC}};

}  // namespace

BenchTraining::BenchTraining(const std::string& data, const std::string& codec, v1::OptimizerKind optimizer,
                             size_t bytes, v1::DurabilityLevel level) {
  ServerConfig config;
  config.listen = {"grpc://127.0.0.1:0"};
  config.data_dir = data;
  config.snapshot_journal_bytes = uint64_t{1} << 40;
  Check(config.Validate());
  daemon_ = Take(Daemon::Start(config, &clock_));
  SessionOptions options;
  options.servers = daemon_->addresses();
  options.worker = "worker";
  options.job.set_name(kJob);
  options.job.set_codec(codec);
  options.job.mutable_optimizer()->set_kind(optimizer);
  options.job.set_bucket_bytes(std::max<size_t>(kBucketBytes, 16384));
  options.job.set_lease_ms(60'000);
  if (level != v1::DURABILITY_NONE) options.job.mutable_durability()->set_level(level);
  std::minstd_rand random(7);
  std::normal_distribution<float> normal(0.0f, 0.01f);
  for (size_t begin = 0; begin < bytes; begin += kBucketBytes) {
    const size_t elements = std::min(bytes - begin, kBucketBytes) / sizeof(float);
    v1::TensorSpec* tensor = options.job.add_tensors();
    tensor->set_name(absl::StrCat("layer", begin / kBucketBytes, ".weight"));
    tensor->add_shape(elements);
    parameters_.emplace_back(elements, 0.5f);
    gradients_.emplace_back(elements);
    for (float& x : gradients_.back()) x = normal(random);
  }
  for (auto& parameter : parameters_) options.memory.push_back(parameter);
  session_ = Take(Session::Join(std::move(options)));
}

std::vector<double> BenchTraining::Rounds(int count) {
  std::vector<const float*> gradients;
  for (const auto& gradient : gradients_) gradients.push_back(gradient.data());
  const std::vector<float> rates = {1e-3f};
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) seconds.push_back(Seconds([&] { Check(session_->Exchange(gradients, rates)); }));
  return seconds;
}

JobShard& BenchTraining::shard() { return *Take(daemon_->registry().Find(kJob)); }

void BenchTraining::RequestSnapshot() { Check(daemon_->registry().RequestSnapshot(kJob)); }

void MeasureRounds(const DurabilityConfig& config, Report* report) {
  struct Size {
    std::string name;
    const char* codec;
    size_t bytes;
    int rounds;  // per measurement
  };
  const std::string mib = absl::StrCat(config.bytes / kMiB, " MiB");
  const Size sizes[] = {{"4 KiB dense", "dense:values=fp32", kSmallBytes, 200},
                        {mib + " TAGC 1 %", "tagc:density=0.01", config.bytes, 4},
                        {mib + " dense", "dense:values=fp32", config.bytes, 2}};
  for (const Size& size : sizes) {
    std::vector<std::unique_ptr<BenchTraining>> trainings;
    std::vector<std::function<double()>> runs;
    for (const Level& level : kLevels) {
      trainings.push_back(
          std::make_unique<BenchTraining>(absl::StrCat(config.directory, "/rounds-", size.name, "-", level.name),
                                          size.codec, v1::OPTIMIZER_STEP, size.bytes, level.level));
      trainings.back()->Rounds(2);
      runs.push_back([training = trainings.back().get(), &size] {
        double sum = 0;
        for (const double s : training->Rounds(size.rounds)) sum += s;
        return size.rounds / sum;
      });
    }
    const auto measured = Interleave(config.rounds, runs);
    for (size_t i = 0; i < measured.size(); ++i) {
      Row row{absl::StrCat(size.name, ", durability ", kLevels[i].name), Median(measured[i]), "rounds/s", {}, "", {}};
      if (i > 0) {
        row.ratio = MedianRatio(measured[i], measured[0]);
        row.ratio_to = "none";
      }
      report->Add(row);
    }
  }
}

void MeasurePause(const DurabilityConfig& config, Report* report) {
  constexpr int kRounds = 12;  // of a block
  BenchTraining training(config.directory + "/pause", "tagc:density=0.01", v1::OPTIMIZER_ADAMW, config.bytes,
                         v1::DURABILITY_INTERVAL);
  training.Rounds(3);
  std::vector<double> all[2];
  std::vector<double> medians[2];
  uint64_t snapshots = 0;
  for (int block = 0; block < 2 * config.rounds; ++block) {
    const bool with = block % 2 == 1;
    std::atomic<bool> done{!with};
    // One snapshot after the other, for as long as the block lasts.
    std::thread taker([&] {
      while (!done) {
        const uint64_t before = training.shard().Describe(false, false).durability().snapshots();
        training.RequestSnapshot();
        while (!done && training.shard().Describe(false, false).durability().snapshots() == before) {
          absl::SleepFor(absl::Milliseconds(2));
        }
        ++snapshots;
      }
    });
    std::vector<double> seconds = training.Rounds(kRounds);
    done = true;
    taker.join();
    medians[with].push_back(Median(seconds));
    all[with].insert(all[with].end(), seconds.begin(), seconds.end());
    // What is still being written belongs to no block.
    if (with) absl::SleepFor(absl::Seconds(1));
  }
  report->Note("snapshots", absl::StrCat(snapshots, " during ", all[1].size(), " rounds, one after the other"));
  report->Add({"round without snapshots, p50", 1e3 * Quantile(all[0], 0.5), "ms", {}, "", {}});
  report->Add({"round while snapshots are taken, p50", 1e3 * Quantile(all[1], 0.5), "ms",
               MedianRatio(medians[1], medians[0]), "without", kPauseTarget, true});
  report->Add({"round without snapshots, p99", 1e3 * Quantile(all[0], 0.99), "ms", {}, "", {}});
  report->Add({"round while snapshots are taken, p99", 1e3 * Quantile(all[1], 0.99), "ms",
               Quantile(all[1], 0.99) / Quantile(all[0], 0.99), "without", kPauseTarget, true});
}

}  // namespace gradwire::bench
