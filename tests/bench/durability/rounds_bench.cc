// Training while journals and snapshots are written; see durability_bench.h.
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

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

uint64_t BenchTraining::Snapshots() {
  return Take(daemon_->registry().Find(kJob))->Describe(false, false).durability().snapshots();
}

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
      runs.push_back(
          [training = trainings.back().get(), &size] { return size.rounds / Sum(training->Rounds(size.rounds)); });
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
  constexpr int kRounds = 12;  // of a block without, and at least of one with
  BenchTraining training(config.directory + "/pause", "tagc:density=0.01", v1::OPTIMIZER_ADAMW, config.bytes,
                         v1::DURABILITY_INTERVAL);
  training.Rounds(3);
  std::vector<double> all[2];
  std::vector<double> medians[2];
  std::vector<double> means[2];
  std::vector<double> taken;
  const auto add = [&](bool with, const std::vector<double>& seconds) {
    all[with].insert(all[with].end(), seconds.begin(), seconds.end());
    medians[with].push_back(Median(seconds));
    means[with].push_back(Sum(seconds) / static_cast<double>(seconds.size()));
  };
  for (int block = 0; block < config.rounds; ++block) {
    add(false, training.Rounds(kRounds));
    // For as long as one snapshot takes, or several: the next one begins when one has ended.
    std::vector<double> seconds;
    while (seconds.size() < kRounds) {
      const uint64_t before = training.Snapshots();
      double took = 0;
      training.RequestSnapshot();
      while (training.Snapshots() == before) {
        seconds.push_back(training.Rounds(1)[0]);
        took += seconds.back();
      }
      taken.push_back(took);
    }
    add(true, seconds);
  }
  report->Note("snapshots", absl::StrFormat("%d of %d MiB during %d rounds, each in %.2f s (median)", taken.size(),
                                            3 * config.bytes / kMiB, all[1].size(), Median(taken)));
  const auto compare = [report](const std::string& what, double without, double with, const Ratio& ratio) {
    report->Add({"round without snapshots, " + what, 1e3 * without, "ms", {}, "", {}});
    report->Add({"round while snapshots are taken, " + what, 1e3 * with, "ms", ratio, "without", kPauseTarget, true});
  };
  compare("p50", Quantile(all[0], 0.5), Quantile(all[1], 0.5), MedianRatio(medians[1], medians[0]));
  compare("mean", Sum(all[0]) / static_cast<double>(all[0].size()), Sum(all[1]) / static_cast<double>(all[1].size()),
          MedianRatio(means[1], means[0]));
  compare("p99", Quantile(all[0], 0.99), Quantile(all[1], 0.99), Quantile(all[1], 0.99) / Quantile(all[0], 0.99));
}

}  // namespace gradwire::bench
