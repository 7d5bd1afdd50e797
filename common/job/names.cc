// Names: glob patterns and the roles that names suggest.
#include <algorithm>
#include <cctype>

#include "common/job/glob.h"
#include "common/job/job.h"

namespace gradwire {

bool GlobMatch(std::string_view pattern, std::string_view text) {
  uint64_t steps = UINT64_MAX;
  return *GlobMatchWithin(pattern, text, &steps);
}

std::optional<bool> GlobMatchWithin(std::string_view pattern, std::string_view text, uint64_t* steps) {
  size_t p = 0, t = 0, star = std::string_view::npos, star_text = 0;
  while (t < text.size()) {
    if ((*steps)-- == 0) {
      *steps = 0;
      return std::nullopt;
    }
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*') {
      ++p, ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

v1::Role GuessRole(std::string_view name, const std::vector<uint64_t>& shape) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto has = [&](std::initializer_list<std::string_view> words) {
    return std::any_of(words.begin(), words.end(),
                       [&](std::string_view w) { return lower.find(w) != std::string::npos; });
  };
  if (lower.ends_with("bias")) return v1::ROLE_BIAS;
  if (shape.size() <= 1) return v1::ROLE_NORM;  // scales of LayerNorm, BatchNorm, RMSNorm; other vectors alike
  if (has({"lm_head", "classifier", "output_projection", "head.weight", "fc_out"})) return v1::ROLE_HEAD;
  if (has({"emb", "wte", "wpe", "tok_", "pos_"}) || lower == "shared.weight" || lower.ends_with(".shared.weight")) {
    return v1::ROLE_EMBEDDING;  // T5 and BART call theirs shared
  }
  if (has({"attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv", "query", "key", "value"})) {
    return v1::ROLE_ATTENTION;
  }
  if (has({"mlp", "ffn", "feed_forward", "c_fc", "fc1", "fc2", "up_proj", "down_proj", "gate_proj", "intermediate",
           "linear", "densereludense"})) {
    return v1::ROLE_MLP;
  }
  return v1::ROLE_OTHER;
}

}  // namespace gradwire
