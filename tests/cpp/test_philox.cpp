// problem/philox.h: the generator is the published one with 7 rounds, and dropout is a fair function of coordinates alone.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>

#include "problem/philox.h"

namespace flash::problem {
namespace {

// Philox4x32 as in the paper's section 3.3, written apart from philox.h.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1],
         static_cast<uint32_t>(a)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

TEST(Philox, ReferenceMatchesThePublishedVector) {  // Random123 kat_vectors: philox4x32 10, zeros
  const std::array<uint32_t, 4> want{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}, 10), want);
}

TEST(Philox, DrawsAreThatGeneratorWithSevenRounds) {
  const uint64_t seed[2] = {0x0123456789ABCDEFull, 0xFEDCBA9876543210ull};
  const Dropout d = dropout(seed, 0.5);
  for (int64_t plane : {0, 1, 77})
    for (int64_t row : {0, 3, 1000})
      for (int64_t col : {0, 5, 40000})
        for (uint32_t lane : {0u, 13u, 31u}) {
          const Philox got = d.draw(plane, row, col, lane);
          const auto want = philox(
              {static_cast<uint32_t>(col) * 32 + lane, static_cast<uint32_t>(row), static_cast<uint32_t>(plane), d.stream},
              {static_cast<uint32_t>(d.key), static_cast<uint32_t>(d.key >> 32)}, 7);
          for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want[i]);
        }
}

TEST(Dropout, APatchUsesEverySixteenBitsOnce) {
  std::set<std::array<uint32_t, 3>> used;  // lane, word, half
  for (int64_t row = 0; row < 16; ++row)
    for (int64_t col = 0; col < 16; ++col) {
      const uint32_t lane = Dropout::lane_of(row, col);
      EXPECT_LT(lane, 32u);
      Philox numbers;
      for (uint32_t i = 0; i < 4; ++i) numbers.word[i] = (2 * i + 1) << 16 | (2 * i);
      const uint32_t number = Dropout::bits_of(numbers, row, col);
      used.insert({lane, number / 2, number % 2});
    }
  EXPECT_EQ(used.size(), 256u);
}

TEST(Dropout, KeepsTheRightPartAndDependsOnEverything) {
  const uint64_t seed[2] = {42, 43}, other[2] = {42, 44};
  for (double p : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    const Dropout d = dropout(seed, p), e = dropout(other, p);
    int64_t kept = 0, row_differs = 0, col_differs = 0, plane_differs = 0, seed_differs = 0;
    constexpr int64_t kRows = 200, kCols = 300;
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < kCols; ++j) {
        const bool keep = d.keeps(5, i, j);
        kept += keep;
        row_differs += keep != d.keeps(5, i + 1, j);
        col_differs += keep != d.keeps(5, i, j + 1);
        plane_differs += keep != d.keeps(6, i, j);
        seed_differs += keep != e.keeps(5, i, j);
      }
    const double count = kRows * kCols, sigma = std::sqrt(count * p * (1 - p));
    EXPECT_NEAR(static_cast<double>(kept), count * (1 - p), 5 * sigma);
    const double differ = count * 2 * p * (1 - p);  // of independent draws
    for (int64_t differs : {row_differs, col_differs, plane_differs, seed_differs})
      EXPECT_NEAR(static_cast<double>(differs), differ, 6 * std::sqrt(differ) + 1e-9);
  }
}

}  // namespace
}  // namespace flash::problem
