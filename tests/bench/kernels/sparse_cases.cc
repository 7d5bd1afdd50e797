// Selection, index, sketch and peeling at one density: one worker's frame, encoded and decoded.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "absl/strings/str_format.h"
#include "common/codec/index_code.h"
#include "common/codec/tagc/geometry.h"
#include "common/codec/tagc/position_counters.h"
#include "kernels/math/select.h"
#include "tests/bench/kernels/timing.h"

namespace gradwire::bench {
namespace {

constexpr uint32_t kIndexBlock = 1u << 20;
constexpr int32_t kLimit = 127;   // one worker, cells of one byte
constexpr int kExponentBits = 6;  // the threshold is some tens of units
constexpr size_t kSegmentBytes = 24;
constexpr size_t kLine = 16;           // elements of a cache line
constexpr size_t kStretch = 1u << 17;  // elements that stay in the L2 cache between reading and writing them
constexpr double kUnion = 1.03;        // what the geometry is prepared for, of what comes

// Gaussian; clustered: in stretches of 4096 whose scale varies by e^+-1.5 (one standard deviation), so that most of
// what is selected lies in a tenth of the tensor.
std::vector<float> Gradient(size_t n, bool clustered) {
  std::mt19937_64 random(42);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> table(1 << 20);
  for (float& v : table) v = normal(random);
  std::vector<float> out(n);
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

// One worker's round.
struct Frame {
  kernels::SelectArgs select;
  kernels::SketchArgs sketch;
  std::vector<float> pending;
  std::vector<uint32_t> positions;
  std::vector<int32_t> integers;
  size_t taken = 0;
  std::vector<CodedIndex> index;
  std::vector<uint8_t> cells;
  std::vector<uint32_t> decoded;  // of the index
  std::vector<uint32_t> merged;   // union
  std::vector<int32_t> sums;
  std::vector<uint8_t> resolved;
  std::vector<float> parameters;
};

class SparseCases {
 public:
  SparseCases(const Config& config, double density, bool clustered)
      : config_(config),
        b_(*config.backend),
        density_(density),
        gradient_(Gradient(config.elements, clustered)),
        counters_(config.elements, 4) {
    const size_t n = config.elements;
    f_.pending = gradient_;
    f_.positions.resize(n);
    f_.integers.resize(n);
    f_.parameters.resize(n);
    f_.sketch = {.salt = 0x1234567890ABCDEF, .groups = 1, .cells_per_group = 3, .cell_bytes = 1};
    Threshold();
    int e = 0;
    std::frexp(kernels::FloatFromBits(f_.select.key << kernels::kKeyShift), &e);
    f_.select.exponent = e - kExponentBits;
    f_.select.limit = kLimit;
    Take();
    for (size_t i = 0; i < f_.taken; ++i) {
      const uint32_t line = f_.positions[i] / kLine * kLine;
      if (dirtied_.empty() || dirtied_.back() != line) dirtied_.push_back(line);
    }
    written_.resize(2 * f_.taken);
    const tagc::Geometry geometry = tagc::GeometryFor(kUnion * static_cast<double>(f_.taken), 1.0);
    f_.sketch.groups = geometry.groups;
    f_.sketch.cells_per_group = geometry.cells_per_group;
    EncodeIndexBlocks();
    Sketch();
    counters_.Increment({f_.positions.data(), f_.taken});
    wide_add_.assign(f_.cells.size(), 0);
    Decode();
    Verify();
  }

  double taken() const { return static_cast<double>(f_.taken); }
  double deferred() const { return deferred_; }

  void Restore() { std::memcpy(f_.pending.data(), gradient_.data(), gradient_.size() * sizeof(float)); }
  void Threshold() {
    const kernels::Threshold t = b_.FindThreshold(f_.pending.data(), f_.pending.size(),
                                                  density_ * static_cast<double>(f_.pending.size()), nullptr);
    f_.select.key = t.key;
    f_.select.keep_below = t.keep_below;
  }
  void Take() {
    f_.taken = b_.TakeSelected(f_.pending.data(), f_.pending.size(), f_.select, 0, f_.positions.data(),
                               f_.integers.data(), nullptr);
  }
  // What threshold and residual ask of memory, without their arithmetic: everything is read twice (what is taken is not
  // known before the threshold is), the cache lines that hold something taken are written, and so is what is taken.
  void TouchMemory() {
    float* const x = f_.pending.data();
    b_.RangeOf(x, f_.pending.size(), nullptr);
    size_t next = 0;
    for (size_t begin = 0; begin < f_.pending.size(); begin += kStretch) {
      b_.RangeOf(x + begin, std::min(kStretch, f_.pending.size() - begin), nullptr);
      for (; next < dirtied_.size() && dirtied_[next] < begin + kStretch; ++next) {
        volatile float& first = x[dirtied_[next]];
        first = first;
      }
    }
    std::fill(written_.begin(), written_.end(), static_cast<uint32_t>(next));
  }
  void EncodeIndexBlocks() {
    f_.index.clear();
    size_t first = 0;
    for (size_t begin = 0; begin < config_.elements; begin += kIndexBlock) {
      size_t last = first;
      const size_t count = std::min<size_t>(kIndexBlock, config_.elements - begin);
      while (last < f_.taken && f_.positions[last] < begin + count) ++last;
      f_.index.push_back(EncodeIndex({f_.positions.data() + first, last - first}, static_cast<uint32_t>(begin),
                                     static_cast<uint32_t>(count)));
      first = last;
    }
  }
  void DecodeIndexBlocks() {
    f_.decoded.clear();
    for (size_t i = 0; i < f_.index.size(); ++i) {
      const size_t begin = i * kIndexBlock;
      const size_t count = std::min<size_t>(kIndexBlock, config_.elements - begin);
      if (!DecodeIndex(f_.index[i].coding, f_.index[i].payload, static_cast<uint32_t>(begin),
                       static_cast<uint32_t>(count), &f_.decoded)
               .ok()) {
        std::abort();
      }
    }
  }
  void Sketch() {
    f_.cells.assign(size_t{f_.sketch.groups} * f_.sketch.cells_per_group * static_cast<size_t>(f_.sketch.cell_bytes),
                    0);
    b_.SketchAdd(f_.positions.data(), f_.integers.data(), f_.taken, f_.sketch, f_.cells.data(), nullptr);
  }
  void Union() { f_.merged = counters_.Union(); }
  void Peel() {
    f_.sums.resize(f_.merged.size());
    f_.resolved.resize(f_.merged.size());
    b_.SketchPeel(f_.cells.data(), f_.sketch, f_.merged.data(), f_.merged.size(), f_.sums.data(), f_.resolved.data(),
                  nullptr);
  }
  void Decode() {
    Union();
    Peel();
  }
  void Step() {
    b_.SparsePlainStep(f_.parameters.data(), f_.merged.data(), f_.sums.data(), f_.merged.size(), 0, -8, 1, 1e-9f,
                       nullptr);
  }
  void MergeCells() {
    b_.AddCells(wide_add_.data(), f_.cells.data(), f_.sketch.cell_bytes,
                f_.cells.size() / static_cast<size_t>(f_.sketch.cell_bytes), kernels::Sign::kAdd, nullptr);
  }
  void MergeIndex() {
    DecodeIndexBlocks();
    scratch_counters_.Clear();
    scratch_counters_.Increment(f_.decoded);
  }

  // Bytes of index and cells over the information in them: the entropy of the index and the bits of the values.
  double WireRatio() const {
    double bytes = static_cast<double>(f_.cells.size());
    for (const CodedIndex& coded : f_.index) bytes += static_cast<double>(coded.payload.size() + kSegmentBytes);
    const double n = static_cast<double>(config_.elements);
    const double d = taken() / n;
    const double bits =
        n * (-d * std::log2(d) - (1 - d) * std::log2(1 - d)) + taken() * 8 * static_cast<double>(f_.sketch.cell_bytes);
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
    return {
        {"threshold", [this] { Threshold(); }, restore, bytes, copy, {}, 0},
        {"take selected", [this] { Take(); }, restore, bytes, copy, {}, 0},
        {"memory alone of threshold + residual", [this] { TouchMemory(); }, restore, bytes, copy, {}, 0},
        {"threshold + residual", [this] { Threshold(), Take(); }, restore, bytes, copy, 0.9, 0},
        {"exact top-k", [this] { Threshold(), Take(); }, restore, bytes, copy, at(0.01, 0.85), 0},
        {"encode: threshold, residual, index, sketch", [this] { Threshold(), Take(), EncodeIndexBlocks(), Sketch(); },
         restore, bytes, copy, encode_target, 0},
        {"index encode", [this] { EncodeIndexBlocks(); }, {}, bytes, copy, {}, taken()},
        {"index decode", [this] { DecodeIndexBlocks(); }, {}, bytes, copy, {}, taken()},
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
  // A benchmark of wrong results would be worth nothing.
  void Verify() {
    DecodeIndexBlocks();
    if (f_.merged.size() != f_.taken || !std::equal(f_.merged.begin(), f_.merged.end(), f_.positions.begin()) ||
        f_.decoded != f_.merged) {
      std::fprintf(stderr, "bench_kernels: positions do not survive coding and merging\n");
      std::abort();
    }
    for (size_t i = 0; i < f_.taken; ++i) {
      if (f_.resolved[i] == 0) {
        deferred_ += 1 / taken();
      } else if (f_.sums[i] != f_.integers[i]) {
        std::fprintf(stderr, "bench_kernels: peeling gave a wrong sum\n");
        std::abort();
      }
    }
  }

  const Config& config_;
  kernels::Backend& b_;
  const double density_;
  const std::vector<float> gradient_;
  tagc::PositionCounters counters_;
  tagc::PositionCounters scratch_counters_{config_.elements, 4};
  std::vector<uint8_t> wide_add_;
  std::vector<uint32_t> dirtied_;  // first element of each cache line that holds something taken
  std::vector<uint32_t> written_;  // as long as the positions and integers
  Frame f_;
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
