// Adding to a sketch and peeling it: the CUDA kernels against the reference, bit for bit, including what peeling cannot
// resolve, groups that shared memory cannot hold, and elements that all fall into one group.
#include <algorithm>
#include <numeric>
#include <set>

#include "kernels/math/sketch.h"
#include "tests/gpu/agreement.h"

namespace gradwire::kernels::cuda {
namespace {

using SketchAgreement = Agreement;
GW_AGREEMENT_SUITE(SketchAgreement);

struct Sample {
  std::vector<uint32_t> positions;  // unique
  std::vector<int32_t> integers;
};

// `clustered`: runs of neighbours. Values use all bits of a cell.
Sample MakeSample(size_t n, bool clustered, std::mt19937_64& random) {
  std::set<uint32_t> unique;
  while (unique.size() < n) {
    const uint32_t start = static_cast<uint32_t>(random());
    for (uint32_t i = 0; i < (clustered ? 500u : 1u) && unique.size() < n; ++i) unique.insert(start + i);
  }
  Sample s;
  s.positions.assign(unique.begin(), unique.end());
  std::shuffle(s.positions.begin(), s.positions.end(), random);
  for (size_t i = 0; i < n; ++i) s.integers.push_back(static_cast<int32_t>(random()));
  return s;
}

class SketchCase {
 public:
  SketchCase(AsyncBackend& backend, Backend& reference) : backend_(backend), reference_(reference) {}

  // Adds and peels on both; `offset`: of the cells, in bytes. Returns how many elements were not resolved.
  size_t Run(const Sample& s, const SketchArgs& args, size_t offset, std::mt19937_64& random) {
    const size_t n = s.positions.size();
    std::vector<uint8_t> cells(size_t{args.groups} * args.cells_per_group * static_cast<size_t>(args.cell_bytes), 0);
    Buffer<uint32_t> positions(backend_.runtime(), s.positions, 0);
    Buffer<int32_t> integers(backend_.runtime(), s.integers, 0);
    Buffer<uint8_t> on_device(backend_.runtime(), cells, offset);
    backend_.SketchAdd(positions.get(), integers.get(), n, args, on_device.get(), nullptr);
    reference_.SketchAdd(s.positions.data(), s.integers.data(), n, args, cells.data(), nullptr);
    EXPECT_EQ(on_device.Read(), cells) << "sketch of " << n;

    std::vector<int32_t> sums(n, 7);
    std::vector<uint8_t> resolved(n, 7);
    Buffer<int32_t> device_sums(backend_.runtime(), sums, 0);
    Buffer<uint8_t> device_resolved(backend_.runtime(), resolved, 1);
    backend_.SketchPeel(on_device.get(), args, positions.get(), n, device_sums.get(), device_resolved.get(), nullptr);
    reference_.SketchPeel(cells.data(), args, s.positions.data(), n, sums.data(), resolved.data(), nullptr);
    EXPECT_EQ(device_resolved.Read(), resolved) << "peeling of " << n;
    EXPECT_EQ(device_sums.Read(), sums) << "peeling of " << n;
    EXPECT_EQ(on_device.Read(), cells) << "peeling changed the cells";

    // Cells that no sums explain: what is resolved depends on the positions alone.
    const std::vector<uint8_t> garbage = MakeBytes(cells.size(), random);
    Buffer<uint8_t> device_garbage(backend_.runtime(), garbage, offset);
    backend_.SketchPeel(device_garbage.get(), args, positions.get(), n, device_sums.get(), device_resolved.get(),
                        nullptr);
    EXPECT_EQ(device_resolved.Read(), resolved) << "peeling garbage, " << n;
    return n - static_cast<size_t>(std::count(resolved.begin(), resolved.end(), 1));
  }

 private:
  AsyncBackend& backend_;
  Backend& reference_;
};

TEST_P(SketchAgreement, AddAndPeel) {
  SketchCase on(backend(), *reference_);
  for (int width : {1, 2, 4}) {
    for (size_t n : {0u, 1u, 2u, 63u, 64u, 65u, 1023u, 1024u, 1025u, 20'011u}) {
      for (uint32_t groups : {1u, 7u, 61u}) {
        for (bool clustered : {false, true}) {
          const uint32_t third = static_cast<uint32_t>(static_cast<double>(n) / groups * 0.46 + 45);
          const SketchArgs args = {random_(), groups, 3 * third, width};
          on.Run(MakeSample(n, clustered, random_), args, n % 4, random_);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(SketchAgreement, TheTwoCoreStaysUnresolved) {
  SketchCase on(backend(), *reference_);
  for (double cells_per_element : {0.1, 0.6, 1.0, 1.15, 1.21, 1.23}) {
    for (int width : {1, 4}) {
      const size_t n = 6000;
      const uint32_t third = static_cast<uint32_t>(cells_per_element * n / 2 / 3);
      const size_t unresolved = on.Run(MakeSample(n, false, random_), {random_(), 2, 3 * third, width}, 0, random_);
      if (cells_per_element < 1.2) {
        EXPECT_GT(unresolved, n / 10) << cells_per_element;
      }
    }
  }
}

// One cell per third: all elements of a group fall onto the same three cells; one element alone resolves, more never
// do.
TEST_P(SketchAgreement, ThreeCellsForAll) {
  SketchCase on(backend(), *reference_);
  for (size_t n : {1u, 2u, 3u, 3000u, 40'000u}) {
    const size_t unresolved = on.Run(MakeSample(n, false, random_), {random_(), 1, 3, 4}, 1, random_);
    EXPECT_EQ(unresolved, n == 1 ? 0 : n);
  }
}

// More elements in one group than the narrow words can number, and more cells than shared memory has.
TEST_P(SketchAgreement, WideGroups) {
  SketchCase on(backend(), *reference_);
  for (int width : {1, 2, 4}) {
    EXPECT_EQ(on.Run(MakeSample(40'000, false, random_), {random_(), 1, 3 * 17'500, width}, 0, random_), 0u);
    EXPECT_EQ(on.Run(MakeSample(50'000, true, random_), {random_(), 2, 3 * 30'000, width}, 3, random_), 0u);
    // Cells that fit, elements that do not; the few that are alone in a cell have numbers of more than 16 bits too.
    for (int salt = 0; salt < 5; ++salt) {
      const SketchArgs args = {random_(), 1, 3 * 7500, width};
      EXPECT_GT(on.Run(MakeSample(80'000, false, random_), args, 0, random_), 70'000u);
    }
  }
}

TEST_P(SketchAgreement, ManyGroups) {
  SketchCase on(backend(), *reference_);
  on.Run(MakeSample(9000, false, random_), {random_(), 5000, 3 * 60, 1}, 0, random_);
  on.Run(MakeSample(5, false, random_), {random_(), 3000, 3 * 2, 2}, 0, random_);
}

// The number of elements is the device's; what lies behind it is not touched.
TEST_P(SketchAgreement, CountsInDeviceMemory) {
  for (uint64_t count : {0u, 1u, 4000u, 5000u}) {
    const size_t most = 5000;
    const Sample s = MakeSample(most, false, random_);
    const SketchArgs args = {random_(), 3, 3 * 900, 1};
    std::vector<uint8_t> cells(3 * 3 * 900, 0);
    auto positions = OnDevice(s.positions);
    auto integers = OnDevice(s.integers);
    auto on_device = OnDevice(cells);
    auto n = OnDevice(std::vector<uint64_t>{count});
    auto sums = OnDevice(std::vector<int32_t>(most, 7));
    auto resolved = OnDevice(std::vector<uint8_t>(most, 7));
    backend().SketchAddAsync(positions.get(), integers.get(), {most, n.get()}, args, on_device.get(), nullptr);
    backend().SketchPeelAsync(on_device.get(), args, positions.get(), {most, n.get()}, sums.get(), resolved.get(),
                              nullptr);
    std::vector<int32_t> expected_sums(most, 0);
    std::vector<uint8_t> expected_resolved(most, 0);
    reference_->SketchAdd(s.positions.data(), s.integers.data(), count, args, cells.data(), nullptr);
    reference_->SketchPeel(cells.data(), args, s.positions.data(), count, expected_sums.data(),
                           expected_resolved.data(), nullptr);
    EXPECT_EQ(on_device.Read(), cells);
    EXPECT_EQ(sums.Read(), expected_sums);
    EXPECT_EQ(resolved.Read(), expected_resolved);
  }
}

}  // namespace
}  // namespace gradwire::kernels::cuda
