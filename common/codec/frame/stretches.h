// Runs of a bucket that lie one behind the other in the memory of the caller.
#pragma once

#include <cstdint>
#include <span>

#include "common/codec/codec.h"

namespace gradwire {

// Calls fn(first run, runs, position of the first element, elements) for each stretch of runs that lie one behind the
// other in the caller's memory: consecutive runs of one tensor.
template <typename Fn>
void ForEachStretch(const BucketLayout& layout, std::span<const RunInput> inputs, Fn fn) {
  const auto follows = [&](size_t run) {
    const Run& before = layout.runs[run - 1];
    const auto next = [&](const float* memory) { return memory == nullptr ? nullptr : memory + before.length; };
    return layout.runs[run].tensor == before.tensor && layout.runs[run].offset == before.offset + before.length &&
           inputs[run].pending == next(inputs[run - 1].pending) &&
           inputs[run].gradient == next(inputs[run - 1].gradient);
  };
  for (size_t first = 0, last = 0; first < layout.runs.size(); first = last) {
    ++last;
    while (last < layout.runs.size() && follows(last)) ++last;
    const uint64_t begin = layout.run_begin[first];
    fn(first, last - first, begin, layout.run_begin[last] - begin);
  }
}

}  // namespace gradwire
