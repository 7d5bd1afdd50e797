// Kernels on a GPU next to a device-to-device copy, in one interleaved run: bytes that the operation must move (each
// input read once, each output written once; the passes of the threshold over its sample counted as made) per second.
// Then what a shard server does with the chunks that it receives, next to the bus alone.
// Exits with 77 where there is no GPU.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/bench/lib/flags.h"
#include "tests/bench/lib/report.h"
#include "tests/gpu/device/bench_pushes.h"

namespace gradwire::kernels::cuda {
namespace {

using bench::Report;

// Device memory for the length of a benchmark.
class Memory {
 public:
  Memory(DeviceRuntime& runtime, size_t bytes) : runtime_(runtime), data_(runtime.Allocate(bytes, nullptr)) {
    if (data_ == nullptr) {
      std::fprintf(stderr, "no %zu bytes of device memory left; take fewer --elements\n", bytes);
      std::exit(1);
    }
  }
  ~Memory() { runtime_.Free(data_, nullptr); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  DeviceRuntime& runtime_;
  void* const data_;
};

struct Case {
  std::string name;
  double bytes = 0;
  std::optional<double> target;     // of the ratio to the copy
  std::function<void()> prepare;    // not timed
  std::function<void()> operation;  // on the stream of the benchmark
};

class Bench {
 public:
  Bench(AsyncBackend& backend, size_t n, int rounds)
      : backend_(backend), runtime_(backend.runtime()), n_(n), rounds_(rounds), stream_(runtime_.NewStream()) {}
  ~Bench() {
    runtime_.DeleteEvent(start_);
    runtime_.DeleteEvent(end_);
    runtime_.DeleteStream(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void Run(Report& report) {
    Dense();
    for (const bool clustered : {false, true}) {
      for (const double density : {0.001, 0.01, 0.05, 0.1}) Sparse(density, clustered, report);
    }
    Measure(report);
  }

 private:
  // Seconds of one run, by events around it.
  double Seconds(const Case& c) {
    if (c.prepare) c.prepare();
    runtime_.Record(start_, stream_);
    c.operation();
    runtime_.Record(end_, stream_);
    runtime_.Synchronize(stream_);
    return runtime_.Seconds(start_, end_);
  }

  // Every case against the copy, interleaved.
  void Measure(Report& report) {
    const Case copy = {"copy", 8.0 * static_cast<double>(n_), {}, {}, [this] {
                         runtime_.Copy(b_.as<float>(), a_.as<float>(), n_ * 4, stream_);
                       }};
    for (const Case& c : cases_) {
      Seconds(c);  // warm
      Seconds(copy);
      const auto seconds = bench::Interleave(rounds_, {[&] { return Seconds(copy); }, [&] { return Seconds(c); }});
      std::vector<double> copy_rate, rate;
      for (int i = 0; i < rounds_; ++i) {
        copy_rate.push_back(copy.bytes / seconds[0][static_cast<size_t>(i)] * 1e-9);
        rate.push_back(c.bytes / seconds[1][static_cast<size_t>(i)] * 1e-9);
      }
      if (!copy_reported_) report.Add({"copy, device to device", bench::Median(copy_rate), "GB/s", {}, "", {}, false});
      copy_reported_ = true;
      report.Add({c.name, bench::Median(rate), "GB/s", bench::MedianRatio(rate, copy_rate), "copy", c.target, false});
    }
    cases_.clear();
  }

  void Add(std::string name, double bytes_per_element, std::optional<double> target, std::function<void()> operation) {
    cases_.push_back({std::move(name), bytes_per_element * static_cast<double>(n_), target, {}, std::move(operation)});
  }

  void Upload(const Memory& to, const std::vector<float>& values) {
    runtime_.ToDevice(to.as<void>(), values.data(), values.size() * sizeof(float), stream_);
    runtime_.Synchronize(stream_);
  }

  void Dense() {
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> values(n_);
    for (float& v : values) v = normal(random);
    for (const Memory* m : {&a_, &b_, &c_, &d_}) Upload(*m, values);
    const AdamWCoefficients adamw = MakeAdamW(1e-3f, 0.1f, 0.9f, 0.95f, 1e-8f, 5);
    float *a = a_.as<float>(), *b = b_.as<float>(), *c = c_.as<float>(), *d = d_.as<float>();
    uint8_t* bytes = b_.as<uint8_t>();
    Add("merge: add float32", 12, 0.85, [=, this] { backend_.Add(a, b, n_, stream_); });
    Add("merge: add int8 to int32", 9, 0.85,
        [=, this] { backend_.AddIntegers(a_.as<int32_t>(), bytes, 1, n_, Sign::kAdd, stream_); });
    Add("merge: add int32", 12, 0.85,
        [=, this] { backend_.AddIntegers(a_.as<int32_t>(), bytes, 4, n_, Sign::kAdd, stream_); });
    Add("merge: add bfloat16 to the grid", 18, 0.85,
        [=, this] { backend_.AddFloats(grid_.as<int64_t>(), bytes, 2, n_, Sign::kAdd, stream_); });
    Add("merge: cells of 8 bits", 3, 0.85,
        [=, this] { backend_.AddCells(a_.as<uint8_t>(), bytes, 1, n_, Sign::kAdd, stream_); });
    Add("AdamW", 28, {}, [=, this] { backend_.AdamW(a, b, c, d, n_, adamw, stream_); });
    Add("quantise to int8", 9, {}, [=, this] { backend_.Quantize(a, n_, -4, 127, 1, bytes, stream_); });
    Add("split bfloat16", 10, {}, [=, this] { backend_.SplitBf16(a, n_, kLargestBf16, bytes, stream_); });
  }

  // Encode: threshold, selection, sketch. Decode: peeling, sparse step; and with AdamW on the dense rest.
  void Sparse(double density, bool clustered, Report& report) {
    Measure(report);
    std::mt19937_64 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> values(n_, 0.0f);
    const size_t run = clustered ? 4096 : 1;
    for (size_t i = 0; i < n_; ++i) {
      if (!clustered || i / run % 8 == 0) values[i] = normal(random) + (clustered ? 3.0f : 0.0f);
    }
    Upload(c_, values);
    const double wanted = density * static_cast<double>(n_);
    const uint32_t groups = std::max(1u, static_cast<uint32_t>(wanted / 8192));
    const uint32_t third = static_cast<uint32_t>(wanted / groups * 1.3 / 3 + 60);
    const SketchArgs sketch = {99, groups, 3 * third, 1};
    const double cells = 3.0 * third * groups;
    const SelectArgs select = {0, 0, 12345, 0, -5, 127};
    const uint64_t most = static_cast<uint64_t>(1.1 * wanted) + 1024;
    const std::string what = absl::StrFormat("%g %% %s", 100 * density, clustered ? "clustered" : "uniform");
    auto* selection = small_.as<DeviceSelection>();
    auto* taken = reinterpret_cast<uint64_t*>(small_.as<uint8_t>() + 256);
    float *a = a_.as<float>(), *c = c_.as<float>();
    auto *positions = b_.as<uint32_t>(), *resolved = grid_.as<uint32_t>();
    auto *integers = d_.as<int32_t>(), *sums = reinterpret_cast<int32_t*>(resolved + n_);
    uint8_t* sketch_cells = reinterpret_cast<uint8_t*>(positions + n_ / 2);
    const ElementCount count = {std::min<uint64_t>(most, n_ / 4), taken};
    const auto restore = [=, this] { runtime_.Copy(a, c, n_ * 4, stream_); };
    const auto encode = [=, this] {
      backend_.FindThresholdAsync(a, n_, wanted, Accuracy::kEstimate, selection, stream_);
      backend_.TakeSelectedAsync(a, n_, select, selection, 0, positions, integers, taken, stream_);
      backend_.SketchAddAsync(positions, integers, count, sketch, sketch_cells, stream_);
    };
    const auto peel = [=, this] {
      backend_.SketchPeelAsync(sketch_cells, sketch, positions, count, sums, reinterpret_cast<uint8_t*>(resolved),
                               stream_);
    };
    const double n = static_cast<double>(n_);
    const double sampled = static_cast<double>(SampleOf(n_, wanted, Accuracy::kEstimate).size);
    cases_.push_back({what + ": threshold", 8 * sampled, {}, restore, [=, this] {
                        backend_.FindThresholdAsync(a, n_, wanted, Accuracy::kEstimate, selection, stream_);
                      }});
    cases_.push_back({what + ": encode", 8 * sampled + 4 * n + wanted * 12 + 2 * cells, 0.7, restore, encode});
    cases_.push_back({what + ": peel", cells + wanted * 9, {}, {}, peel});
    const auto prepare = [=] {
      restore();
      encode();
    };
    cases_.back().prepare = prepare;
    const AdamWCoefficients adamw = MakeAdamW(1e-3f, 0.1f, 0.9f, 0.95f, 1e-8f, 5);
    cases_.push_back({what + ": peel, sparse step, AdamW", cells + wanted * 25 + 28 * n, 0.75, prepare, [=, this] {
                        peel();
                        backend_.SparsePlainStepAsync(a, positions, sums, count, 0, -5, 1, 1e-3f, stream_);
                        backend_.AdamW(a, c, moments_.as<float>(), moments_.as<float>() + n_, n_, adamw, stream_);
                      }});
  }

  AsyncBackend& backend_;
  DeviceRuntime& runtime_;
  const size_t n_;
  const int rounds_;
  Stream* const stream_;
  Event* const start_ = runtime_.NewEvent();
  Event* const end_ = runtime_.NewEvent();
  const Memory a_{runtime_, n_ * 4}, b_{runtime_, n_ * 4}, c_{runtime_, n_ * 4}, d_{runtime_, n_ * 4};
  const Memory grid_{runtime_, n_ * 8}, moments_{runtime_, n_ * 8}, small_{runtime_, 512};
  std::vector<Case> cases_;
  bool copy_reported_ = false;
};

int Main(int argc, char** argv) {
  size_t elements = size_t{1} << 26;
  int rounds = 15;
  bench::Flags flags(
      "gpu",
      "Kernels on a GPU next to a device-to-device copy, and what a shard server does with the chunks that it "
      "receives next to the bus alone. Exits with 77 where there is no GPU.");
  flags.Add("--elements", &elements, "Of the gradient")->check(CLI::Range(size_t{4096}, size_t{1} << 40));
  flags.Add("--rounds", &rounds, "Interleaved rounds; figures are their medians")->check(CLI::Range(1, 1 << 20));
  flags.Parse(argc, argv);
  auto backend = MakeAsyncCudaBackend();
  if (!backend.ok()) {
    std::printf("nothing was measured: %s\n", std::string(backend.status().message()).c_str());
    return 77;
  }
  Report report("gpu");
  report.Note("device", (*backend)->runtime().Describe());
  report.Note("elements", std::to_string(elements));
  Bench(**backend, elements, rounds).Run(report);
  bench::MeasurePushes(**backend, {.rounds = rounds}, report);
  report.Print();
  return report.WriteJson(flags.json());
}

}  // namespace
}  // namespace gradwire::kernels::cuda

int main(int argc, char** argv) { return gradwire::kernels::cuda::Main(argc, argv); }
