// Walking a range of positions of a bucket through the runs it crosses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/job/layout.h"

namespace gradwire {

// Calls fn(run, offset_in_run, length, position) for each piece of [begin, begin + count), in order.
// Precondition: begin + count <= layout.elements.
template <typename Fn>
void ForEachRunPiece(const BucketLayout& layout, uint64_t begin, uint64_t count, Fn fn) {
  if (count == 0) return;
  size_t run = static_cast<size_t>(std::upper_bound(layout.run_begin.begin(), layout.run_begin.end(), begin) -
                                   layout.run_begin.begin() - 1);
  const uint64_t end = begin + count;
  for (uint64_t position = begin; position < end; ++run) {
    const uint64_t piece_end = std::min(end, layout.run_begin[run + 1]);
    fn(run, position - layout.run_begin[run], piece_end - position, position);
    position = piece_end;
  }
}

// Calls fn(first run, elements, position) for each piece of a tensor in the layout: runs that lie one behind the other
// in it. In order.
template <typename Fn>
void ForEachTensorPiece(const BucketLayout& layout, Fn fn) {
  const auto follows = [&](size_t run) {
    const Run& before = layout.runs[run - 1];
    return layout.runs[run].tensor == before.tensor && layout.runs[run].offset == before.offset + before.length;
  };
  for (size_t first = 0, last = 0; first < layout.runs.size(); first = last) {
    for (++last; last < layout.runs.size() && follows(last);) ++last;
    fn(layout.runs[first], layout.run_begin[last] - layout.run_begin[first], layout.run_begin[first]);
  }
}

// Index of the run that `position` lies in.
inline size_t RunOf(const BucketLayout& layout, uint64_t position) {
  return static_cast<size_t>(std::upper_bound(layout.run_begin.begin(), layout.run_begin.end(), position) -
                             layout.run_begin.begin() - 1);
}

}  // namespace gradwire
