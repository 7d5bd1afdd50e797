// How sparse a round of a bucket was, and what each form of the same values takes: why a codec that adapts chose what
// it chose. After ZEN's cost equations (arXiv 2309.13254), with shard servers in the place of its balanced partitions.
#pragma once

#include <cmath>
#include <cstdint>

namespace gradwire {

// Of one round. `sent` counts what frames named, each by itself.
struct Traffic {
  uint64_t elements = 0;
  uint32_t contributors = 0;  // 0: nothing is known
  uint64_t sent = 0;
  uint64_t in_union = 0;
  uint32_t dense_pushes = 0;  // frames that came whole
  bool dense_update = false;

  // The fraction of the elements that a worker sends; the mean over workers.
  double density() const {
    return elements == 0 || contributors == 0
               ? 0
               : static_cast<double>(sent) / static_cast<double>(elements) / static_cast<double>(contributors);
  }
  // How much denser the union is than a worker's share: 1 where all send the same elements, `contributors` where no two
  // do.
  double gamma() const {
    return sent == 0 ? 1
                     : static_cast<double>(in_union) * static_cast<double>(contributors) / static_cast<double>(sent);
  }
};

// Bytes of one worker's push and update together, headers apart, for float32 values.
struct FormBytes {
  double dense = 0;
  double coordinates = 0;  // ZEN's COO: 32 bits each of index and value
  double bitmap = 0;
  double gaps = 0;    // an index at the entropy of even positions, of which gap codes are within a few percent
  double sketch = 0;  // the push as index and cells that hold the union, as TAGC's; the update as gaps
};

inline FormBytes BytesOfForms(const Traffic& traffic) {
  constexpr double kValueBytes = 4;
  constexpr double kPeelingLoad = 0.74;  // non-zeros per cell that a sketch still decodes
  const double n = static_cast<double>(traffic.elements);
  const double push = traffic.density();
  const double update = push * traffic.gamma();
  const auto entropy = [n](double p) {
    return p <= 0 || p >= 1 ? 0 : -n * (p * std::log2(p) + (1 - p) * std::log2(1 - p)) / 8;
  };
  FormBytes bytes;
  bytes.dense = 2 * n * kValueBytes;
  bytes.coordinates = (push + update) * n * 2 * kValueBytes;
  bytes.bitmap = (push + update) * n * kValueBytes + 2 * n / 8;
  bytes.gaps = (push + update) * n * kValueBytes + entropy(push) + entropy(update);
  bytes.sketch = (update / kPeelingLoad + update) * n * kValueBytes + entropy(push) + entropy(update);
  return bytes;
}

}  // namespace gradwire
