// SHA-256 by OpenSSL's EVP interface.
#include "common/base/sha256.h"

#include <openssl/evp.h>

#include <cstdlib>

namespace gradwire {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  if (EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) != 1) std::abort();
}

Sha256::~Sha256() = default;

void Sha256::Update(std::span<const uint8_t> data) {
  if (EVP_DigestUpdate(state_->context, data.data(), data.size()) != 1) std::abort();
}

std::string Sha256::Hex() {
  uint8_t digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  if (EVP_DigestFinal_ex(state_->context, digest, &size) != 1) std::abort();
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (unsigned i = 0; i < size; ++i) {
    out.push_back(kHex[digest[i] >> 4]);
    out.push_back(kHex[digest[i] & 15]);
  }
  return out;
}

}  // namespace gradwire
