// bench_zen: ZEN's codec on the gradient of a word embedding over real text (the Python library's): how even the shares
// of shards are, what bitmaps take, and whether frames are as long as the paper's cost equations say (arXiv
// 2309.13254).
// All bytes are those of frames that the codec's own writer made, chunk and segment headers counted. No network: a
// frame has the same bytes on every transport.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/bench/lib/flags.h"
#include "tests/bench/lib/plot.h"
#include "tests/bench/lib/report.h"
#include "tests/bench/zen/embedding.h"
#include "tests/conformance/codec/sharded_round.h"

namespace gradwire::bench {
namespace {

using testing::ImbalanceOf;
using testing::ShardedResult;
using testing::ShardedRound;
using Gradients = std::vector<std::vector<float>>;

constexpr double kPairBytes = 8;  // of a non-zero as coordinates: 32 bits each of index and value
constexpr double kMostImbalance = 1.1;
constexpr double kMostDifference = 1.03;

uint64_t Sum(const std::vector<uint64_t>& values) { return std::accumulate(values.begin(), values.end(), uint64_t{0}); }

std::vector<bool> UnionOf(const Gradients& gradients, size_t first, size_t count) {
  std::vector<bool> there(gradients[first].size());
  for (size_t w = first; w < first + count; ++w) {
    for (size_t i = 0; i < there.size(); ++i) there[i] = there[i] || gradients[w][i] != 0;
  }
  return there;
}
double CountOf(const std::vector<bool>& there) {
  return static_cast<double>(std::count(there.begin(), there.end(), true));
}

// The largest part of `there` relative to the mean, where each of `parts` has as many consecutive elements.
double EvenSliceImbalance(const std::vector<bool>& there, uint32_t parts) {
  std::vector<uint64_t> counts(parts);
  for (size_t i = 0; i < there.size(); ++i) counts[i * parts / there.size()] += there[i];
  return ImbalanceOf(counts);
}

// The worst of several batches.
template <typename Imbalance>
double WorstOf(const std::vector<std::vector<bool>>& batches, Imbalance imbalance) {
  double worst = 0;
  for (const std::vector<bool>& there : batches) worst = std::max(worst, imbalance(there));
  return worst;
}

// How even the shares of shards are, with rows of `dim` elements. `wanted`: the runs that have a target.
void MeasureImbalance(const Text& text, uint64_t dim, uint64_t tokens, bool wanted, const std::string& plot_path,
                      Report* report) {
  std::vector<std::vector<bool>> batches;
  for (uint64_t w = 0; w < 4; ++w) batches.push_back(UnionOf({EmbeddingGradient(text, dim, tokens, w)}, 0, 1));
  Plot plot(absl::StrFormat("Largest share of the non-zeros, relative to the mean; rows of %d", dim), "shards",
            "imbalance, the worst of 4 batches", 2);
  const std::array<uint32_t, 6> shard_counts = {2, 4, 8, 16, 32, 64};
  std::vector<std::pair<double, double>> points;
  for (const uint32_t shards : shard_counts) {
    const double imbalance = WorstOf(batches, [&](const auto& there) { return EvenSliceImbalance(there, shards); });
    points.emplace_back(shards, imbalance);
    report->Add(
        {absl::StrFormat("rows of %d, even slices, %d shards", dim, shards), imbalance, "imbalance", {}, "", {}});
  }
  plot.AddLine("even slices", points);
  for (const uint32_t run : {4096, 256, 64, 16, 4}) {
    points.clear();
    for (const uint32_t shards : shard_counts) {
      const ShardedRound round({absl::StrCat("zen:run=", run), batches[0].size(), shards});
      const double imbalance =
          WorstOf(batches, [&](const auto& there) { return ImbalanceOf(round.CountPerShard(there)); });
      points.emplace_back(shards, imbalance);
      Row row{
          absl::StrFormat("rows of %d, zen:run=%d, %d shards", dim, run, shards), imbalance, "imbalance", {}, "", {}};
      if (wanted && (run == 4 || (run == 16 && shards <= 16))) {  // what README.md recommends
        row.ratio = imbalance;
        row.ratio_to = "even shares";
        row.target = kMostImbalance;
        row.smaller_is_better = true;
      }
      report->Add(row);
    }
    plot.AddLine(absl::StrCat("hashed, runs of ", run), points);
  }
  if (!plot.Write(plot_path)) std::fprintf(stderr, "bench_zen: cannot write %s\n", plot_path.c_str());
}

// The larger of two over the smaller.
double ApartBy(double a, double b) { return std::max(a / b, b / a); }

// Bitmaps of the update: one bit per element in all, whatever the number of shards.
void MeasureBitmaps(const Gradients& gradients, Report* report) {
  const double elements = static_cast<double>(gradients[0].size());
  for (const uint32_t shards : {1, 8, 64}) {
    ShardedRound round(
        {"zen:index=bitmap,run=16", gradients[0].size(), shards, static_cast<uint32_t>(gradients.size())});
    const ShardedResult result = round.Exchange(gradients);
    const double bytes =
        static_cast<double>(Sum(result.update_bytes)) - 4 * static_cast<double>(Sum(result.update_elements));
    report->Add({absl::StrFormat("bitmaps and headers of an update, %d shards", shards), bytes, "bytes",
                 bytes / (elements / 8), "|G| bits", kMostDifference, true});
  }
}

// Bytes that a node sends and receives, as the paper counts them: nodes are workers and servers, and what a node owes
// itself does not travel.
void MeasureEquations(const Gradients& all, Report* report) {
  const double elements = static_cast<double>(all[0].size());
  for (const uint32_t n : {2, 4, 8, 16}) {
    const Gradients gradients(all.begin(), all.begin() + n);
    double sent = 0;  // non-zeros of a worker
    for (uint32_t w = 0; w < n; ++w) sent += CountOf(UnionOf(gradients, w, 1)) / n;
    const auto gamma = [&](uint32_t i) {  // of i workers, over all groups of so many
      double unions = 0;
      for (uint32_t first = 0; first < n; first += i) unions += CountOf(UnionOf(gradients, first, i));
      const uint32_t groups = n / i;
      return unions / groups / sent;
    };
    const double dense_bytes = 4 * elements;
    report->Add({absl::StrFormat("density of a worker, %d workers", n), sent / elements, "", {}, "", {}});
    report->Add({absl::StrFormat("gamma(%d)", n), gamma(n), "", {}, "", {}});

    // Balanced parallelism: T_bp = (n-1)/n (gamma(n)+1) 2Md.
    ShardedRound round({"zen:index=coo,run=16", all[0].size(), n, n});
    const ShardedResult result = round.Exchange(gradients);
    double bp = 0;
    for (uint32_t node = 0; node < n; ++node) {
      bp += static_cast<double>(Sum(result.push_bytes[node]) - result.push_bytes[node][node]);
      bp += static_cast<double>(Sum(result.update_bytes) - result.update_bytes[node]);
    }
    bp /= n;
    const double bp_expected = (n - 1.0) / n * (gamma(n) + 1) * kPairBytes * sent;
    report->Add({absl::StrFormat("balanced parallelism, %d nodes", n), bp, "bytes", ApartBy(bp, bp_expected),
                 "T_bp, either way", kMostDifference, true});

    // Hierarchical centralization: T_hc = sum over i = 1..log2 n of gamma(2^(i-1)) 2Md. In stage i a node sends the
    // sum of 2^(i-1) workers.
    double hc = 0, hc_expected = 0;
    for (uint32_t i = 1; i < n; i *= 2) {
      double stage = 0;
      for (uint32_t first = 0; first < n; first += i) {
        std::vector<float> sum(all[0].size());
        const std::vector<bool> there = UnionOf(gradients, first, i);
        for (size_t k = 0; k < sum.size(); ++k) sum[k] = there[k] ? 1.0f : 0.0f;
        stage +=
            static_cast<double>(ShardedRound({"zen:index=coo", sum.size(), 1, 1}).Exchange({sum}).push_bytes[0][0]);
      }
      const uint32_t groups = n / i;
      hc += stage / groups;
      hc_expected += gamma(i) * kPairBytes * sent;
    }
    report->Add({absl::StrFormat("hierarchical centralization, %d nodes", n), hc, "bytes", ApartBy(hc, hc_expected),
                 "T_hc, either way", kMostDifference, true});

    // What Gradwire does, with the index that is smallest, for all of a worker's bytes, against dense float32.
    const ShardedResult smallest = ShardedRound({"zen", all[0].size(), n, n}).Exchange(gradients);
    const double both = static_cast<double>(Sum(smallest.push_bytes[0]) + Sum(smallest.update_bytes));
    report->Add({absl::StrFormat("zen, push and update, %d workers", n),
                 both,
                 "bytes",
                 both / (2 * dense_bytes),
                 "dense fp32",
                 {}});
  }
}

// Elements of which a given fraction is not 0; more of them for a larger fraction, never others.
std::vector<float> AtDensity(double density) {
  constexpr uint64_t kElements = 1 << 20;
  std::mt19937_64 random(7);
  std::vector<float> gradient(kElements);
  for (float& x : gradient) x = static_cast<double>(random() >> 11) * 0x1p-53 < density ? 1.0f : 0.0f;
  return gradient;
}

double BytesPerElement(const std::string& codec, double density) {
  const std::vector<float> gradient = AtDensity(density);
  ShardedRound round({codec, gradient.size(), 1, 1});
  return static_cast<double>(round.Exchange({gradient}).push_bytes[0][0]) / static_cast<double>(gradient.size());
}

// The density from which on frames of `first` are longer than those of `second`.
double CrossingOf(const std::string& first, const std::string& second, double low, double high) {
  for (int i = 0; i < 14; ++i) {
    const double middle = std::sqrt(low * high);
    (BytesPerElement(first, middle) > BytesPerElement(second, middle) ? high : low) = middle;
  }
  return std::sqrt(low * high);
}

void MeasureSizes(const std::string& plot_path, Report* report) {
  Plot plot("A frame of 2^20 elements, of which some are not 0", "density", "bytes per element");
  const std::pair<std::string, std::string> codecs[] = {{"coo", "zen:index=coo"},
                                                        {"bitmap", "zen:index=bitmap"},
                                                        {"auto", "zen:index=auto"},
                                                        {"smallest", "zen:index=smallest"},
                                                        {"dense", "dense:fp32"}};
  for (const auto& [name, codec] : codecs) {
    std::vector<std::pair<double, double>> points;
    for (double density = 0x1p-12; density < 1.001; density *= std::sqrt(2)) {
      points.emplace_back(density, BytesPerElement(codec, density));
    }
    plot.AddLine(name, points);
  }
  plot.AddMark(1.0 / 32, "1/32");
  plot.AddMark(1.0 / 2, "1/2");
  const double bitmap = CrossingOf("zen:index=coo", "zen:index=bitmap", 0.005, 0.2);
  const double dense = CrossingOf("zen:index=coo", "dense:fp32", 0.3, 0.55);
  report->Add({"density where bitmaps become smaller than coo", bitmap, "", ApartBy(bitmap, 1.0 / 32),
               "1/32, either way", kMostDifference, true});
  report->Add({"density where dense becomes smaller than coo", dense, "", ApartBy(dense, 0.5), "1/2, either way",
               kMostDifference, true});
  for (const double density : {0.001, 0.01, 1.0 / 32, 0.1}) {
    const double smallest = BytesPerElement("zen:index=smallest", density);
    report->Add({absl::StrFormat("smallest index, density %.4g", density),
                 smallest,
                 "B/element",
                 smallest / BytesPerElement("zen:index=auto", density),
                 "auto",
                 {}});
  }
  if (!plot.Write(plot_path)) std::fprintf(stderr, "bench_zen: cannot write %s\n", plot_path.c_str());
}

int Main(int argc, char** argv) {
  std::string folder = PythonLibrary();
  uint64_t dim = 64, tokens = 16384;
  Flags flags(
      "zen",
      "ZEN's codec on the gradient of a word embedding over real text: how even the shares of shards are, what "
      "bitmaps take, and whether frames are as long as the paper's cost equations say (arXiv 2309.13254). Plots lie "
      "beside the JSON.");
  flags.Add("--text", &folder, "The *.py files below this folder are the text");
  flags.Add("--dim", &dim, "Elements of a row; shares are also measured with rows four times as long")
      ->check(CLI::Range(1, 1 << 20));
  flags.Add("--tokens", &tokens, "Words in the batch of a worker")->check(CLI::Range(1, 1 << 20));
  flags.Parse(argc, argv);
  const std::string& json = flags.json();
  const Text text = ReadText(folder);
  if (text.words.empty()) {
    std::fprintf(stderr, "bench_zen: no words: '%s' has no *.py files (--text=DIR names a folder that has)\n",
                 folder.c_str());
    return 1;
  }
  const std::string stem = json.ends_with(".json") ? json.substr(0, json.size() - 5) : json;
  const auto beside = [&stem](const std::string& name) { return stem.empty() ? "" : stem + "-" + name + ".svg"; };
  Gradients gradients;
  for (uint64_t w = 0; w < 16; ++w) gradients.push_back(EmbeddingGradient(text, dim, tokens, w));
  Report report("zen");
  report.Note("command", absl::StrCat("tests/bench/run zen --dim=", dim, " --tokens=", tokens));
  report.Note("text", absl::StrFormat("%s: %d words, %d different ones", folder, text.words.size(), text.vocabulary));
  report.Note(
      "gradient",
      absl::StrFormat("%d rows of %d, sorted by frequency; a batch of %d words touches %d of them", text.vocabulary,
                      dim, tokens, static_cast<int>(CountOf(UnionOf(gradients, 0, 1)) / static_cast<double>(dim))));
  MeasureImbalance(text, dim, tokens, false, beside("imbalance"), &report);
  MeasureImbalance(text, 4 * dim, tokens, true, beside("imbalance-long-rows"), &report);
  MeasureBitmaps(Gradients(gradients.begin(), gradients.begin() + 8), &report);
  MeasureEquations(gradients, &report);
  MeasureSizes(beside("sizes"), &report);
  report.Print();
  if (!stem.empty()) std::printf("plots: %s-{sizes,imbalance,imbalance-long-rows}.svg\n", stem.c_str());
  return report.WriteJson(json);
}

}  // namespace
}  // namespace gradwire::bench

int main(int argc, char** argv) { return gradwire::bench::Main(argc, argv); }
