// Gradients of a word embedding, as skewed as real text is: the rows of the words that a batch holds are not 0.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::bench {

// The words of the *.py files below `folder`, in order, as indices into a vocabulary that is sorted by frequency, the
// most frequent one first. Empty where there are no such files.
struct Text {
  std::vector<uint32_t> words;
  uint32_t vocabulary = 0;
};
Text ReadText(const std::string& folder);
// The folder of the Python library of this machine; empty if there is none.
std::string PythonLibrary();

// The gradient of `vocabulary` rows of `dim` elements for `tokens` consecutive words, the batch of a worker: elements
// of the rows that it holds are small normal numbers, all others 0.
std::vector<float> EmbeddingGradient(const Text& text, uint64_t dim, uint64_t tokens, uint64_t worker);

}  // namespace gradwire::bench
