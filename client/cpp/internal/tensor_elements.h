// Gradients of which few elements are not 0: what the caller gives as rows, and what of it waits for another round.
// Everything here takes a time that grows with these elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::client {

// What the training loop gives of a tensor; borrowed until the round ends.
struct GivenGradient {
  GivenGradient() = default;
  GivenGradient(const float* all) : values(all) {}        // NOLINT: either is a gradient
  GivenGradient(const RowGradient& some) : rows(some) {}  // NOLINT
  const float* values = nullptr;
  std::optional<RowGradient> rows;  // in the place of `values`
};

struct TensorElement {
  uint64_t index = 0;  // in the tensor
  float value = 0;
};
using TensorElements = std::vector<TensorElement>;  // of one tensor; where nothing else is said ascending, each once

// Whether these may be rows of the tensor. InvalidArgument names it.
absl::Status CheckRows(const Tensor& tensor, const RowGradient& gradient);
// Rows that are what CheckRows says, whatever the caller writes to its own meanwhile.
struct CheckedRows {
  // Copies the rows. Errors: those of CheckRows.
  static absl::StatusOr<CheckedRows> Of(const Tensor& tensor, const RowGradient& gradient);
  std::vector<int64_t> rows;
  const float* values = nullptr;  // the caller's
};
// Elements that one row of the tensor has.
uint64_t RowElements(const Tensor& tensor);
// Those that are not 0.
TensorElements ElementsOf(const Tensor& tensor, const CheckedRows& gradient);
// Those that are not 0 among `values`, which begin at element `first`.
TensorElements ElementsOf(std::span<const float> values, uint64_t first = 0);
// The gradient as all other functions take it.
std::vector<float> DenseOf(const Tensor& tensor, const CheckedRows& gradient);
// Of elements in any order: ascending, each once, summed in the order in which they stood.
TensorElements Summed(TensorElements elements);
// The sums.
TensorElements Merged(const TensorElements& a, const TensorElements& b);

// Runs of one tensor that lie in a slice, one behind the other.
struct TensorRuns {
  uint32_t tensor = 0;
  size_t first = 0, last = 0;  // of BucketLayout::runs
};
// By tensor, in order.
std::vector<TensorRuns> TensorsIn(const BucketLayout& layout);

// Calls fn(i, run, position) for each elements[i] that lies in these runs of the slice, in order; `elements` are those
// of their tensor.
template <typename Fn>
void ForEachIn(const TensorElements& elements, const BucketLayout& layout, const TensorRuns& runs, Fn fn) {
  const auto begin_of = [&](size_t run) { return layout.runs[run].offset; };
  const auto end_of = [&](size_t run) { return layout.runs[run].offset + layout.runs[run].length; };
  const auto before = [](const TensorElement& element, uint64_t index) { return element.index < index; };
  size_t run = runs.first;
  for (auto element = elements.begin(); run < runs.last; ++run) {
    if (element != elements.end() && element->index < begin_of(run))
      element = std::lower_bound(element, elements.end(), begin_of(run), before);
    if (element == elements.end()) return;
    if (element->index >= end_of(run)) {  // the last run that does not begin behind it
      size_t low = run + 1, high = runs.last;
      while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (begin_of(middle) <= element->index)
          low = middle + 1;
        else
          high = middle;
      }
      if (low > run + 1) run = low - 1;
    }
    for (; element != elements.end() && element->index >= begin_of(run) && element->index < end_of(run); ++element)
      fn(static_cast<size_t>(element - elements.begin()), run,
         layout.run_begin[run] + (element->index - begin_of(run)));
  }
}

}  // namespace gradwire::client
