// See tensor_elements.h.
#include "client/cpp/internal/tensor_elements.h"

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace gradwire::client {

absl::Status CheckRows(const Tensor& tensor, const RowGradient& gradient) {
  const auto invalid = [&](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "': ", why...));
  };
  if (tensor.shape.empty()) return invalid("it has no dimension, and so no rows");
  if (gradient.values == nullptr && !gradient.rows.empty() && tensor.elements != 0)
    return invalid("the gradient is a null pointer");
  for (size_t i = 0; i < gradient.rows.size(); ++i) {
    const int64_t row = gradient.rows[i];
    if (row < 0 || static_cast<uint64_t>(row) >= tensor.shape[0])
      return invalid("row ", row, " of its gradient; the tensor has rows 0 to ", tensor.shape[0], ", exclusive");
    if (i > 0 && row <= gradient.rows[i - 1])
      return invalid("row ", row, " of its gradient comes behind row ", gradient.rows[i - 1],
                     ": rows must ascend, each of them once");
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckedRows> CheckedRows::Of(const Tensor& tensor, const RowGradient& gradient) {
  CheckedRows checked{{gradient.rows.begin(), gradient.rows.end()}, gradient.values};
  GW_RETURN_IF_ERROR(CheckRows(tensor, {checked.rows, checked.values}));
  return checked;
}

uint64_t RowElements(const Tensor& tensor) { return tensor.elements == 0 ? 0 : tensor.elements / tensor.shape[0]; }

TensorElements ElementsOf(const Tensor& tensor, const CheckedRows& gradient) {
  const uint64_t width = RowElements(tensor);
  TensorElements elements;
  elements.reserve(gradient.rows.size() * width);
  const float* value = gradient.values;
  for (const int64_t row : gradient.rows) {
    for (uint64_t index = static_cast<uint64_t>(row) * width, end = index + width; index < end; ++index, ++value)
      if (*value != 0) elements.push_back({index, *value});
  }
  return elements;
}

TensorElements ElementsOf(std::span<const float> values, uint64_t first) {
  TensorElements elements;
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] != 0) elements.push_back({first + i, values[i]});
  return elements;
}

std::vector<float> DenseOf(const Tensor& tensor, const CheckedRows& gradient) {
  const uint64_t width = RowElements(tensor);
  std::vector<float> dense(tensor.elements);
  const float* values = gradient.values;
  for (const int64_t row : gradient.rows) {
    std::copy_n(values, width, dense.begin() + static_cast<ptrdiff_t>(static_cast<uint64_t>(row) * width));
    values += width;
  }
  return dense;
}

TensorElements Summed(TensorElements elements) {
  const auto by_index = [](const TensorElement& a, const TensorElement& b) { return a.index < b.index; };
  if (!std::is_sorted(elements.begin(), elements.end(), by_index))
    std::stable_sort(elements.begin(), elements.end(), by_index);
  size_t n = 0;
  for (const TensorElement& element : elements) {
    if (n > 0 && elements[n - 1].index == element.index)
      elements[n - 1].value += element.value;
    else
      elements[n++] = element;
  }
  elements.resize(n);
  return elements;
}

TensorElements Merged(const TensorElements& a, const TensorElements& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  TensorElements sum;
  sum.reserve(a.size() + b.size());
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    if (j == b.size() || (i < a.size() && a[i].index < b[j].index)) {
      sum.push_back(a[i++]);
    } else if (i == a.size() || b[j].index < a[i].index) {
      sum.push_back(b[j++]);
    } else {
      sum.push_back({a[i].index, a[i].value + b[j].value});
      ++i, ++j;
    }
  }
  return sum;
}

std::vector<TensorRuns> TensorsIn(const BucketLayout& layout) {
  std::vector<TensorRuns> found;
  const std::vector<Run>& runs = layout.runs;
  for (size_t first = 0, last = 0; first < runs.size(); first = last) {
    const uint32_t tensor = runs[first].tensor;
    if (runs.back().tensor == tensor)  // of most slices at once
      last = runs.size();
    else
      while (last < runs.size() && runs[last].tensor == tensor) ++last;
    found.push_back({tensor, first, last});
  }
  return found;
}

}  // namespace gradwire::client
