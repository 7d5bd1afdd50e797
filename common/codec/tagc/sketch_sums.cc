// Summed cells in host memory; see sketch_sums.h.
#include "common/codec/tagc/sketch_sums.h"

#include <vector>

namespace gradwire::tagc {
namespace {

class HostSums final : public SketchSums {
 public:
  explicit HostSums(const TagcShape& shape) : shape_(shape) {}

  void Open(const kernels::SketchArgs& sketch) override {
    sketch_ = sketch;
    cells_.assign(uint64_t{sketch.groups} * sketch.cells_per_group * static_cast<size_t>(shape_.cell_bytes), 0);
  }

  void Merge(const wire::Segment& s, kernels::Sign sign) override {
    uint8_t* cells = cells_.data() + s.begin * static_cast<size_t>(shape_.cell_bytes);
    shape_.backend().AddCells(cells, s.data, shape_.cell_bytes, s.count, sign, nullptr);
  }

  absl::Status Peel(std::span<const uint32_t> positions, int32_t* integers, uint8_t* resolved) override {
    shape_.backend().SketchPeel(cells_.data(), sketch_, positions.data(), positions.size(), integers, resolved,
                                nullptr);
    return absl::OkStatus();
  }

  size_t memory_bytes() const override { return cells_.capacity(); }

 private:
  const TagcShape shape_;
  kernels::SketchArgs sketch_;
  std::vector<uint8_t> cells_;
};

}  // namespace

std::unique_ptr<SketchSums> MakeHostSums(const TagcShape& shape) { return std::make_unique<HostSums>(shape); }

}  // namespace gradwire::tagc
