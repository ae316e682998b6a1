// The layouts of shared tiles by enumeration: every chunk has its own place, 8 rows of a chunk do not conflict, and the shortcuts that
// kernels take from one lane address agree with address().
#include <gtest/gtest.h>

#include <set>

#include "cuda/tile/layout.cuh"

namespace flash::tile {
namespace {

template <class Layout>
class TileLayout : public testing::Test {};
using Layouts = testing::Types<Swizzled<32>, Swizzled<64>, Swizzled<96>, Swizzled<128>, Swizzled<192>, Swizzled<256>,
                               Swizzled<512>, Padded<64>, Padded<128>, Padded<256>>;
TYPED_TEST_SUITE(TileLayout, Layouts);

constexpr int kRows = 64;

TYPED_TEST(TileLayout, ChunksHaveTheirOwnPlaces) {
  std::set<uint32_t> places;
  for (int row = 0; row < kRows; ++row)
    for (int chunk = 0; chunk < TypeParam::kChunks; ++chunk) places.insert(TypeParam::address(0, row, chunk));
  EXPECT_EQ(places.size(), static_cast<size_t>(kRows * TypeParam::kChunks));
  EXPECT_LT(*places.rbegin(), static_cast<uint32_t>(TypeParam::bytes(kRows)));
  for (const uint32_t place : places) EXPECT_EQ(place % 16, 0u);
}

TYPED_TEST(TileLayout, EightRowsOfAChunkHitEightBankGroups) {
  for (int row = 0; row < kRows; row += 8)
    for (int chunk = 0; chunk < TypeParam::kChunks; ++chunk) {
      std::set<uint32_t> groups;
      for (int i = 0; i < 8; ++i) groups.insert(TypeParam::address(0, row + i, chunk) / 16 % 8);
      EXPECT_EQ(groups.size(), 8u) << "row " << row << " chunk " << chunk;
    }
}

TYPED_TEST(TileLayout, StepsAlongColumnsAgree) {
  constexpr int kChunksPerStep = 2;
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < 2; ++half)
      for (int step = 0; step < TypeParam::kChunks / kChunksPerStep; ++step)
        EXPECT_EQ(TypeParam::columns(TypeParam::address(0, row, half), step),
                  TypeParam::address(0, row, kChunksPerStep * step + half));
}

TYPED_TEST(TileLayout, StepsAlongRowsAgree) {
  for (int step = 2; step <= 16; step *= 2)
    for (int row = 0; row < step; ++row)
      for (int chunk = 0; chunk < TypeParam::kChunks; ++chunk)
        for (int n = 0; row + n < kRows; n += step)
          EXPECT_EQ(TypeParam::rows(TypeParam::address(0, row, chunk), n), TypeParam::address(0, row + n, chunk));
}

template <class Layout>
class SwizzledLayout : public testing::Test {};
using SwizzledLayouts =
    testing::Types<Swizzled<32>, Swizzled<64>, Swizzled<96>, Swizzled<128>, Swizzled<192>, Swizzled<256>, Swizzled<512>>;
TYPED_TEST_SUITE(SwizzledLayout, SwizzledLayouts);

TYPED_TEST(SwizzledLayout, StepsAlongChunksAgree) {
  for (int row = 0; row < kRows; ++row)
    for (int chunk = 0; chunk < TypeParam::kChunks; ++chunk)
      for (int n = 0; chunk + n < TypeParam::kChunks; ++n)
        if ((chunk & n) == 0) {
          EXPECT_EQ(TypeParam::chunks(TypeParam::address(0, row, chunk), n), TypeParam::address(0, row, chunk + n));
        }
}

}  // namespace
}  // namespace flash::tile
