// The backend that stages host memory through a device, on the host layer: every operation against the reference.
#include "kernels/cuda/staged_backend.h"

#include "kernels/cuda/device_backend.h"
#include "kernels/math/select.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/host/host_device.h"

namespace gradwire::kernels::cuda {
namespace {

class StagedBackend : public ::testing::TestWithParam<size_t> {
 protected:
  // Runs `op` on the reference and on the staged backend; both get vectors of their own.
  template <class F>
  void Compare(const char* what, F op) {
    std::mt19937_64 same = random_;
    const auto expected = op(*reference_, same);
    EXPECT_EQ(op(*staged_, random_), expected) << what << ", n " << n_;
  }

  std::vector<uint32_t> Bits(const std::vector<float>& x) {
    std::vector<uint32_t> bits;
    for (float v : x) bits.push_back(std::bit_cast<uint32_t>(v));
    return bits;
  }

  const size_t n_ = GetParam();
  std::unique_ptr<Backend> staged_ =
      MakeStagedBackend(std::make_unique<OwningDeviceBackend<HostDevice>>("staged", HostDeviceOptions()));
  std::unique_ptr<Backend> reference_ = MakeReferenceBackend();
  std::mt19937_64 random_{23};
};
INSTANTIATE_TEST_SUITE_P(Cuda, StagedBackend, ::testing::Values(0, 1, 1025));

TEST_P(StagedBackend, SaysWhatItIs) {
  EXPECT_TRUE(staged_->host_memory());
  EXPECT_EQ(staged_->name(), "staged");
}

TEST_P(StagedBackend, DenseMerging) {
  for (int width : {1, 2, 4}) {
    Compare("AddIntegers", [&](Backend& b, std::mt19937_64& random) {
      std::vector<int32_t> acc(n_, 5);
      b.AddIntegers(acc.data(), MakeBytes(n_ * 4, random).data(), width, n_, Sign::kSubtract, nullptr);
      return acc;
    });
    Compare("AssignIntegers", [&](Backend& b, std::mt19937_64& random) {
      std::vector<int32_t> acc(n_, 5);
      b.AssignIntegers(acc.data(), MakeBytes(n_ * 4, random).data(), width, n_, nullptr);
      return acc;
    });
    Compare("AddCells", [&](Backend& b, std::mt19937_64& random) {
      std::vector<uint8_t> acc = MakeBytes(n_ * 4, random);
      b.AddCells(acc.data(), MakeBytes(n_ * 4, random).data(), width, n_, Sign::kAdd, nullptr);
      return acc;
    });
  }
  Compare("AddFloats, FindOutOfGrid, GridToMean", [&](Backend& b, std::mt19937_64& random) {
    const std::vector<uint8_t> values = BytesOf(MakeValues(Pattern::kNormal, n_, random));
    std::vector<int64_t> acc(n_, 5);
    EXPECT_EQ(b.FindOutOfGrid(values.data(), 4, n_, kGridLimitBits, nullptr), -1);
    b.AddFloats(acc.data(), values.data(), 4, n_, Sign::kAdd, nullptr);
    std::vector<int64_t> assigned(n_, 5);
    b.AssignFloats(assigned.data(), values.data(), 4, n_, nullptr);
    std::vector<float> mean(n_);
    b.GridToMean(acc.data(), n_, 3, mean.data(), nullptr);
    return std::tuple(acc, assigned, Bits(mean));
  });
}

TEST_P(StagedBackend, FixedPoint) {
  Compare("Quantize, Dequantize", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> x = MakeValues(Pattern::kNormal, n_, random);
    std::vector<uint8_t> q(2 * n_);
    b.Quantize(x.data(), n_, -4, 100, 2, q.data(), nullptr);
    b.Dequantize(q.data(), 2, n_, -3, x.data(), nullptr);
    return std::pair(q, Bits(x));
  });
  Compare("SplitBf16, AddBf16, RangeOf", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> x = MakeValues(Pattern::kNormal, n_, random);
    std::vector<uint8_t> out(2 * n_);
    b.SplitBf16(x.data(), n_, 1.0f, out.data(), nullptr);
    const std::vector<uint32_t> rest = Bits(x);
    b.AddBf16(out.data(), n_, x.data(), nullptr);
    return std::tuple(out, rest, Bits(x), b.RangeOf(x.data(), n_, nullptr));
  });
}

TEST_P(StagedBackend, Selection) {
  Compare("Add, AddPreconditioned, FindNonFinite", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> x = MakeValues(Pattern::kNormal, n_, random), v(n_, 1.0f);
    const std::vector<float> y = MakeValues(Pattern::kNormal, n_, random);
    b.Add(x.data(), y.data(), n_, nullptr);
    b.AddPreconditioned(x.data(), y.data(), v.data(), n_, MakePrecondition(0.9f, 1e-8f, 1), nullptr);
    if (n_ > 0) x[n_ / 2] = std::numeric_limits<float>::infinity();
    return std::tuple(Bits(x), Bits(v), b.FindNonFinite(x.data(), n_, nullptr));
  });
  Compare("histograms, FindThreshold", [&](Backend& b, std::mt19937_64& random) {
    const std::vector<float> x = MakeValues(Pattern::kNormal, n_, random);
    std::vector<uint64_t> upper(size_t{1} << kUpperBits), lower(size_t{1} << kLowerBits);
    b.UpperHistogram(x.data(), n_, upper.data(), nullptr);
    b.LowerHistogram(x.data(), n_, KeyOf(1.0f) >> kLowerBits, lower.data(), nullptr);
    const Threshold t = b.FindThreshold(x.data(), n_, 0.1 * static_cast<double>(n_), Accuracy::kExact, nullptr);
    return std::tuple(upper, lower, t.key, t.keep_below);
  });
  Compare("TakeSelected", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> x = MakeValues(Pattern::kNormal, n_, random);
    std::vector<uint32_t> positions(n_, 7);
    std::vector<int32_t> integers(n_, 7);
    const size_t taken =
        b.TakeSelected(x.data(), n_, {KeyOf(0.5f), 0, 0, 0, -6, 127}, 40, positions.data(), integers.data(), nullptr);
    return std::tuple(taken, Bits(x), positions, integers);
  });
}

TEST_P(StagedBackend, Sketch) {
  Compare("SketchAdd, SketchPeel", [&](Backend& b, std::mt19937_64& random) {
    std::vector<uint32_t> positions(n_);
    std::vector<int32_t> integers(n_);
    for (size_t i = 0; i < n_; ++i) positions[i] = static_cast<uint32_t>(3 * i);
    for (int32_t& q : integers) q = static_cast<int32_t>(random());
    const SketchArgs args = {random(), 2, 3 * 250, 2};
    std::vector<uint8_t> cells(2 * 2 * 3 * 250, 1);
    b.SketchAdd(positions.data(), integers.data(), n_, args, cells.data(), nullptr);
    std::vector<int32_t> sums(n_, 7);
    std::vector<uint8_t> resolved(n_, 7);
    std::vector<uint8_t> honest(cells.size(), 0);
    b.SketchAdd(positions.data(), integers.data(), n_, args, honest.data(), nullptr);
    b.SketchPeel(honest.data(), args, positions.data(), n_, sums.data(), resolved.data(), nullptr);
    return std::tuple(cells, sums, resolved);
  });
}

TEST_P(StagedBackend, Optimizer) {
  for (float momentum : {0.0f, 0.9f}) {
    Compare("Sgd", [&](Backend& b, std::mt19937_64& random) {
      std::vector<float> p = MakeValues(Pattern::kNormal, n_, random), m(n_, 1.0f);
      const std::vector<float> g = MakeValues(Pattern::kNormal, n_, random);
      b.Sgd(p.data(), g.data(), momentum == 0 ? nullptr : m.data(), n_, {0.1f, 0.01f, momentum, true}, nullptr);
      return std::pair(Bits(p), Bits(m));
    });
  }
  Compare("AdamW, PlainStep", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> p = MakeValues(Pattern::kNormal, n_, random), m(n_, 0.5f), v(n_, 0.25f);
    const std::vector<float> g = MakeValues(Pattern::kNormal, n_, random);
    b.AdamW(p.data(), g.data(), m.data(), v.data(), n_, MakeAdamW(1e-3f, 0.1f, 0.9f, 0.95f, 1e-8f, 4), nullptr);
    b.PlainStep(p.data(), g.data(), n_, 0.1f, 0.01f, nullptr);
    return std::tuple(Bits(p), Bits(m), Bits(v));
  });
  Compare("SparsePlainStep", [&](Backend& b, std::mt19937_64& random) {
    std::vector<float> p = MakeValues(Pattern::kNormal, 2 * n_ + 10, random);
    std::vector<uint32_t> positions(n_);
    std::vector<int32_t> integers(n_, -9);
    for (size_t i = 0; i < n_; ++i) positions[i] = static_cast<uint32_t>(1000 + 5 + 2 * (n_ - i));
    b.SparsePlainStep(p.data(), positions.data(), integers.data(), n_, 1000, -3, 2, 0.1f, nullptr);
    return Bits(p);
  });
}

}  // namespace
}  // namespace gradwire::kernels::cuda
