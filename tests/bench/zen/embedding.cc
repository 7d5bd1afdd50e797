// See embedding.h.
#include "tests/bench/zen/embedding.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <unordered_map>

#include "common/base/hash.h"

namespace gradwire::bench {
namespace {

namespace fs = std::filesystem;

bool InWord(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Calls fn(word) for runs of letters, and for every other byte that is no blank.
template <typename Fn>
void ForEachWord(const std::string& text, Fn fn) {
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (InWord(text[i])) {
      while (end < text.size() && InWord(text[end])) ++end;
    } else if (std::isspace(static_cast<unsigned char>(text[i])) != 0) {
      i = end;
      continue;
    }
    fn(text.substr(i, end - i));
    i = end;
  }
}

}  // namespace

std::string PythonLibrary() {
  std::string found;
  std::error_code error;
  for (const fs::path root : {"/usr/lib", "/usr/local/lib"}) {
    for (const auto& entry : fs::directory_iterator(root, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("python3") && fs::exists(entry.path() / "argparse.py", error))
        found = std::max(found, entry.path().string());
    }
  }
  return found;
}

Text ReadText(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    const std::string path = entry.path().string();
    if (entry.path().extension() == ".py" && path.find("-packages") == std::string::npos) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::unordered_map<std::string, uint32_t> numbers;
  std::vector<uint64_t> counts;
  Text text;
  for (const fs::path& path : files) {
    std::ifstream in(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    ForEachWord(bytes, [&](const std::string& word) {
      const uint32_t number = numbers.try_emplace(word, static_cast<uint32_t>(numbers.size())).first->second;
      if (number == counts.size()) counts.push_back(0);
      ++counts[number];
      text.words.push_back(number);
    });
  }
  std::vector<uint32_t> order(counts.size()), rank(counts.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return counts[a] > counts[b]; });
  for (uint32_t i = 0; i < order.size(); ++i) rank[order[i]] = i;
  for (uint32_t& word : text.words) word = rank[word];
  text.vocabulary = static_cast<uint32_t>(counts.size());
  return text;
}

std::vector<float> EmbeddingGradient(const Text& text, uint64_t dim, uint64_t tokens, uint64_t worker) {
  std::vector<float> gradient(text.vocabulary * dim);
  std::mt19937_64 random(worker + 1);
  std::normal_distribution<float> normal(0, 0.01f);
  const uint64_t n = text.words.size();
  const uint64_t begin = HashCombine(n, worker) % n;
  for (uint64_t t = 0; t < std::min(tokens, n); ++t) {
    float* const row = gradient.data() + text.words[(begin + t) % n] * dim;
    if (row[0] != 0) continue;
    for (uint64_t i = 0; i < dim; ++i) {
      do row[i] = normal(random);
      while (row[i] == 0);
    }
  }
  return gradient;
}

}  // namespace gradwire::bench
