// Selection, index, sketch and peeling at one density: one worker's frame, encoded and decoded.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>

#include "absl/strings/str_format.h"
#include "common/base/large_array.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/tagc/geometry.h"
#include "common/codec/tagc/position_counters.h"
#include "kernels/math/select.h"
#include "tests/bench/kernels/timing.h"

namespace gradwire::bench {
namespace {

constexpr size_t kBucket = 1u << 20;  // elements: 4 MiB
constexpr int32_t kLimit = 127;       // one worker, cells of one byte
constexpr int kExponentBits = 6;      // the threshold is some tens of units
constexpr size_t kSegmentBytes = 24;
constexpr double kUnion = 1.03;  // what the geometry is prepared for, of what comes

// Gaussian; clustered: in stretches of 4096 whose scale varies by e^+-1.5 (one standard deviation), so that most of
// what is selected lies in a tenth of the tensor.
LargeArray<float> Gradient(size_t n, bool clustered) {
  std::mt19937_64 random(42);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> table(1 << 20);
  for (float& v : table) v = normal(random);
  LargeArray<float> out(n);
  for (size_t begin = 0; begin < n; begin += 4096) {
    const float scale = clustered ? std::exp(1.5f * normal(random)) : 1.0f;
    const size_t from = random();
    const size_t step = random() | 1;
    for (size_t i = 0; i < 4096 && begin + i < n; ++i) {
      out[begin + i] = scale * table[(from + i * step) % table.size()];
    }
  }
  return out;
}

// One worker's frame of one bucket, and what becomes of it.
struct Bucket {
  Bucket(size_t first, size_t elements) : begin(first), length(elements) {}

  const size_t begin;  // in the gradient
  const size_t length;
  kernels::SketchArgs sketch{};
  std::span<uint32_t> positions;  // within the bucket
  std::span<int32_t> integers;
  CodedIndex index;
  std::vector<uint8_t> cells;
  std::vector<uint32_t> decoded;  // of the index
  std::vector<uint32_t> merged;   // union
  std::vector<int32_t> sums;
  std::vector<uint8_t> resolved;
  tagc::PositionCounters counters{length, 4};
  tagc::PositionCounters scratch_counters{length, 4};
  std::vector<uint8_t> wide_add;
};

// A tensor of the gradient's size in the buckets that a job has which says nothing about them: the threshold is that of
// the tensor, all else is done bucket by bucket.
class SparseCases {
 public:
  SparseCases(const Config& config, double density, bool clustered)
      : config_(config),
        b_(*config.backend),
        density_(density),
        gradient_(Gradient(config.elements, clustered)),
        pending_(gradient_),
        positions_(config.elements),
        integers_(config.elements),
        parameters_(config.elements) {
    for (size_t begin = 0; begin < config.elements; begin += kBucket) {
      buckets_.emplace_back(begin, std::min(kBucket, config.elements - begin));
    }
    Threshold(kernels::Accuracy::kEstimate);
    int e = 0;
    std::frexp(kernels::FloatFromBits(select_.key << kernels::kKeyShift), &e);
    select_.exponent = e - kExponentBits;
    select_.limit = kLimit;
    Take();
    for (Bucket& b : buckets_) {
      taken_ += b.positions.size();
      const tagc::Geometry geometry = tagc::GeometryFor(kUnion * static_cast<double>(b.positions.size()), 1.0);
      b.sketch = {.salt = 0x1234567890ABCDEF + b.begin,
                  .groups = geometry.groups,
                  .cells_per_group = geometry.cells_per_group,
                  .cell_bytes = 1};
    }
    EncodeIndex();
    Sketch();
    for (Bucket& b : buckets_) {
      b.counters.Increment(b.positions);
      b.wide_add.assign(b.cells.size(), 0);
    }
    Decode();
    Verify();
  }

  double taken() const { return static_cast<double>(taken_); }
  double deferred() const { return deferred_; }

  // Bytes of index and cells over the information in them: the entropy of the index and the bits of the values.
  double WireRatio() const {
    double bytes = 0;
    for (const Bucket& b : buckets_) {
      bytes += static_cast<double>(b.cells.size() + b.index.payload.size() + kSegmentBytes);
    }
    const double n = static_cast<double>(config_.elements);
    const double d = taken() / n;
    const double bits = n * (-d * std::log2(d) - (1 - d) * std::log2(1 - d)) + taken() * 8;  // cells of one byte
    return 8 * bytes / bits;
  }

  std::vector<Case> Cases() {
    const double bytes = 4.0 * static_cast<double>(config_.elements);
    const auto at = [this](double density, double target) {
      return density_ == density ? std::optional<double>(target) : std::nullopt;
    };
    const auto restore = [this] { Restore(); };
    const auto encode_target = density_ == 0.05 ? at(0.05, 0.55) : at(0.01, 0.75);
    const auto decode_target = density_ == 0.05 ? at(0.05, 0.3) : density_ == 0.03 ? at(0.03, 0.5) : at(0.01, 0.9);
    const Against copy = Against::kCopy;
    const auto exact = [this] { Threshold(kernels::Accuracy::kExact); };
    const auto estimate = [this] { Threshold(kernels::Accuracy::kEstimate); };
    return {
        {"exact threshold", exact, restore, bytes, copy, {}, 0},
        {"exact top-k", [=, this] { exact(), Take(); }, restore, bytes, copy, at(0.01, 0.85), 0},
        {"threshold", estimate, restore, bytes, copy, {}, 0},
        {"take selected", [this] { Take(); }, restore, bytes, copy, {}, 0},
        {"threshold + residual", [=, this] { estimate(), Take(); }, restore, bytes, copy, 0.9, 0},
        {"encode: threshold, residual, index, sketch", [=, this] { estimate(), Encode(); }, restore, bytes, copy,
         encode_target, 0},
        {"index encode", [this] { EncodeIndex(); }, {}, bytes, copy, {}, taken()},
        {"index decode", [this] { DecodeIndex(); }, {}, bytes, copy, {}, taken()},
        {"sketch add", [this] { Sketch(); }, {}, bytes, copy, {}, taken()},
        {"union", [this] { Union(); }, {}, bytes, copy, {}, taken()},
        {"peel", [this] { Peel(); }, {}, bytes, copy, {}, taken()},
        {"decode: union, peel", [this] { Decode(); }, {}, bytes, copy, decode_target, taken()},
        {"sparse step", [this] { Step(); }, {}, bytes, copy, {}, taken()},
        {"merge of cells", [this] { MergeCells(); }, {}, bytes, Against::kDenseAdd, 10.0, 0},
        {"merge of the index", [this] { MergeIndex(); }, {}, bytes, Against::kDenseAdd, {}, taken()},
    };
  }

 private:
  void Restore() { std::memcpy(pending_.data(), gradient_.data(), gradient_.size() * sizeof(float)); }

  double Wanted() const { return density_ * static_cast<double>(pending_.size()); }

  // kEstimate: as TAGC's; what follows an exact one takes a few elements more or less.
  void Threshold(kernels::Accuracy accuracy) {
    const kernels::Threshold t = b_.FindThreshold(pending_.data(), pending_.size(), Wanted(), accuracy, nullptr);
    select_.key = t.key;
    select_.keep_below = t.keep_below;
  }
  // Behind what the buckets before took. Returns where the next bucket's begins.
  size_t Take(Bucket& b, size_t first) {
    select_.first_element = b.begin;
    const size_t taken = b_.TakeSelected(pending_.data() + b.begin, b.length, select_, 0, positions_.data() + first,
                                         integers_.data() + first, nullptr);
    b.positions = {positions_.data() + first, taken};
    b.integers = {integers_.data() + first, taken};
    return first + taken;
  }
  void EncodeIndex(Bucket& b) { b.index = gradwire::EncodeIndex(b.positions, 0, static_cast<uint32_t>(b.length)); }
  void DecodeIndex(Bucket& b) {
    b.decoded.clear();
    const absl::Status decoded =
        gradwire::DecodeIndex(b.index.coding, b.index.payload, 0, static_cast<uint32_t>(b.length), &b.decoded);
    if (!decoded.ok()) std::abort();
  }
  void Sketch(Bucket& b) {
    b.cells.assign(size_t{b.sketch.groups} * b.sketch.cells_per_group * static_cast<size_t>(b.sketch.cell_bytes), 0);
    b_.SketchAdd(b.positions.data(), b.integers.data(), b.positions.size(), b.sketch, b.cells.data(), nullptr);
  }
  void Union(Bucket& b) { b.merged = b.counters.Union(); }
  void Peel(Bucket& b) {
    b.sums.resize(b.merged.size());
    b.resolved.resize(b.merged.size());
    b_.SketchPeel(b.cells.data(), b.sketch, b.merged.data(), b.merged.size(), b.sums.data(), b.resolved.data(),
                  nullptr);
  }

  void Take() {
    size_t first = 0;
    for (Bucket& b : buckets_) first = Take(b, first);
  }
  void Encode() {
    size_t first = 0;
    for (Bucket& b : buckets_) {
      first = Take(b, first);
      EncodeIndex(b);
      Sketch(b);
    }
  }
  void EncodeIndex() {
    for (Bucket& b : buckets_) EncodeIndex(b);
  }
  void DecodeIndex() {
    for (Bucket& b : buckets_) DecodeIndex(b);
  }
  void Sketch() {
    for (Bucket& b : buckets_) Sketch(b);
  }
  void Union() {
    for (Bucket& b : buckets_) Union(b);
  }
  void Peel() {
    for (Bucket& b : buckets_) Peel(b);
  }
  void Decode() {
    for (Bucket& b : buckets_) {
      Union(b);
      Peel(b);
    }
  }
  void Step() {
    for (Bucket& b : buckets_) {
      b_.SparsePlainStep(parameters_.data() + b.begin, b.merged.data(), b.sums.data(), b.merged.size(), 0, -8, 1, 1e-9f,
                         nullptr);
    }
  }
  void MergeCells() {
    for (Bucket& b : buckets_) {
      b_.AddCells(b.wide_add.data(), b.cells.data(), b.sketch.cell_bytes,
                  b.cells.size() / static_cast<size_t>(b.sketch.cell_bytes), kernels::Sign::kAdd, nullptr);
    }
  }
  void MergeIndex() {
    for (Bucket& b : buckets_) {
      DecodeIndex(b);
      b.scratch_counters.Clear();
      b.scratch_counters.Increment(b.decoded);
    }
  }
  // A benchmark of wrong results would be worth nothing.
  void Verify() {
    DecodeIndex();
    for (const Bucket& b : buckets_) {
      if (!std::equal(b.merged.begin(), b.merged.end(), b.positions.begin(), b.positions.end()) ||
          b.decoded != b.merged) {
        std::fprintf(stderr, "bench_kernels: positions do not survive coding and merging\n");
        std::abort();
      }
      for (size_t i = 0; i < b.merged.size(); ++i) {
        if (b.resolved[i] == 0) {
          deferred_ += 1 / taken();
        } else if (b.sums[i] != b.integers[i]) {
          std::fprintf(stderr, "bench_kernels: peeling gave a wrong sum\n");
          std::abort();
        }
      }
    }
  }

  const Config& config_;
  kernels::Backend& b_;
  const double density_;
  const LargeArray<float> gradient_;
  LargeArray<float> pending_;
  LargeArray<uint32_t> positions_;  // of all buckets, one behind the other; room for everything
  LargeArray<int32_t> integers_;
  LargeArray<float> parameters_;
  kernels::SelectArgs select_{};
  std::vector<Bucket> buckets_;
  size_t taken_ = 0;
  double deferred_ = 0;
};

}  // namespace

void MeasureSparse(const Config& config, double density, bool clustered, Report* report) {
  SparseCases cases(config, density, clustered);
  const std::string section = absl::StrFormat("%g%% %s", 100 * density, clustered ? "clustered" : "uniform");
  Measure(config, section, cases.Cases(), report);
  report->Add(
      {section + ": wire bytes", cases.WireRatio(), "of bound", cases.WireRatio(), "information bound", 1.35, true});
  report->Add({section + ": unresolved elements", cases.deferred(), "share", {}, "", {}});
  report->Add({section + ": density reached",
               cases.taken() / static_cast<double>(config.elements) / density,
               "of wanted",
               {},
               "",
               {}});
}

}  // namespace gradwire::bench
