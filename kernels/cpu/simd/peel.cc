// See peel.h.
#include "kernels/cpu/simd/peel.h"

#include <algorithm>

namespace gradwire::kernels {

// The queue holds every cell once, and three entries that are written in vain.
Peeler::Peeler(const SketchArgs& args, size_t n)
    : args_(args),
      n_(n),
      records_(n * sizeof(uint64_t)),
      group_of_(n * sizeof(uint32_t)),
      group_size_(size_t{args.groups} * sizeof(uint32_t)),
      sorted_(n * sizeof(uint64_t)),
      begin_((size_t{args.groups} + 1) * sizeof(uint32_t)),
      words_(size_t{args.cells_per_group} * sizeof(uint64_t)),
      queue_((size_t{args.cells_per_group} + 3) * sizeof(uint32_t)) {
  std::fill_n(group_size(), args.groups, 0u);
}

bool Peeler::GroupsFit() { return *std::max_element(group_size(), group_size() + args_.groups) <= kLargestGroup; }

void Peeler::SortByGroup() {
  uint32_t* const cursors = cursor();  // takes the place of the sizes
  uint32_t at = 0;
  for (uint32_t g = 0; g < args_.groups; ++g) {
    const uint32_t size = group_size()[g];
    begin()[g] = at;
    cursors[g] = at;
    at += size;
  }
  begin()[args_.groups] = at;
  const uint64_t* const from = records();
  const uint32_t* const group = group_of();
  uint64_t* const to = sorted();
  for (size_t i = 0; i < n_; ++i) to[cursors[group[i]]++] = from[i];
}

}  // namespace gradwire::kernels
