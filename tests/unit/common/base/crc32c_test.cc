// CRC-32C against published check values and against the portable loop at every length and alignment that matters.
#include "common/base/crc32c.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "common/base/hash.h"
#include "common/base/sha256.h"

namespace gradwire {
namespace {

std::span<const uint8_t> AsBytes(std::string_view s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }

TEST(Crc32c, MatchesPublishedValues) {
  EXPECT_EQ(Crc32c(AsBytes("123456789")), 0xE3069283u);
  EXPECT_EQ(Crc32c(std::vector<uint8_t>(32, 0)), 0x8A9136AAu);     // RFC 3720, B.4
  EXPECT_EQ(Crc32c(std::vector<uint8_t>(32, 0xFF)), 0x62A8AB43u);  // RFC 3720, B.4
  EXPECT_EQ(Crc32c({}), 0u);
}

TEST(Crc32c, HardwareEqualsPortable) {
  std::vector<uint8_t> data(40000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(Mix64(i));
  for (size_t length : {0,    1,    7,    8,    9,    255,  256,  767,   768,   769,   1023,  1024,
                        1025, 1087, 1088, 1279, 1280, 1343, 4096, 12287, 12288, 12289, 13057, 39000}) {
    for (size_t offset : {0, 1, 3, 7}) {
      const std::span<const uint8_t> s(data.data() + offset, length);
      EXPECT_EQ(Crc32c(s), Crc32cPortable(s)) << "length " << length << " offset " << offset;
      EXPECT_EQ(Crc32cUnfolded(s, 7), Crc32cPortable(s, 7)) << "length " << length << " offset " << offset;
      std::vector<uint8_t> copy(static_cast<size_t>(length) + 1, 0x5A);
      EXPECT_EQ(CopyCrc32c(s, copy.data(), 7), Crc32c(s, 7)) << "length " << length << " offset " << offset;
      EXPECT_TRUE(std::equal(s.begin(), s.end(), copy.begin())) << "length " << length << " offset " << offset;
      EXPECT_EQ(copy.back(), 0x5A) << "length " << length << " offset " << offset;
    }
  }
}

TEST(Crc32c, ExtendsOverPieces) {
  std::vector<uint8_t> data(30001);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(Mix64(i) >> 8);
  const std::span<const uint8_t> all(data);
  for (size_t cut : {0, 1, 999, 12288, 30001}) {
    EXPECT_EQ(Crc32c(all.subspan(cut), Crc32c(all.first(cut))), Crc32c(all)) << cut;
  }
}

TEST(Sha256, MatchesPublishedValue) {
  Sha256 h;
  h.Update(AsBytes("a"));
  h.Update(AsBytes("bc"));
  EXPECT_EQ(h.Hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");  // FIPS 180-2, B.1
}

}  // namespace
}  // namespace gradwire
