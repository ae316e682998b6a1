// The order of streamed windows (cuda/sm90/forward_stream.h): every band once, all that its rows see within its blocks, and elements of
// the stream that each warpgroup can take in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "cuda/sm90/tiles.h"

namespace flash::sm90 {
namespace {

void expect_complete(const Stream& stream, int planes) {
  std::set<std::pair<int, int>> bands;
  for (int block = 0; block < stream.teams * stream.lag; ++block) {
    Walks walks(stream, block);
    Stretch stretch;
    int number = 0, elements = 0;
    std::array<int, 4> element{};  // of each warpgroup: the one behind its last tile
    while (walks.next(&stretch)) {
      if (stretch.empty()) continue;
      const Blocks all{stream.blocks(walks.band(stretch.from)).first, stream.blocks(walks.band(stretch.to - 1)).last};
      for (int i = stretch.to - 1; i >= stretch.from; --i, ++number) {
        const int band = walks.band(i), group = walks.group(i);
        const Blocks blocks = stream.blocks(band);
        ASSERT_TRUE(band >= 0 && band < stream.bands && bands.insert({stretch.plane, band}).second);
        for (const int row : {band * kBand, std::min(band * kBand + kBand, stream.rows) - 1}) {
          const int newest = std::min(row + stream.diagonal + stream.right, stream.keys - 1);
          const int oldest = std::max(row + stream.diagonal - stream.left, 0);
          ASSERT_TRUE(oldest <= newest && oldest / kBand >= blocks.first && newest / kBand <= blocks.last);
        }
        const int start = elements + all.last - blocks.last;
        ASSERT_TRUE(start >= element[group] && blocks.first >= all.first);
        element[group] = start + blocks.count();
      }
      elements += all.count();
      for (int group = 0; group < stream.groups; ++group) element[group] = elements;
    }
    ASSERT_LE(number, kMostBands);
  }
  EXPECT_EQ(bands.size(), static_cast<size_t>(planes) * stream.bands);
}

TEST(Stream, CoversEveryBandOnce) {
  int streams = 0;
  for (const auto& [groups, stages] : {std::pair{3, 4}, {4, 8}})
    for (const int rows : {4650, 6000, 10000, 16384})
      for (const int more : {-100, 0, 1, 64, 777})
        for (const bool bottom_right : {false, true})
          for (const auto& [left, right] :
               {std::pair{1024, 0}, {1023, 0}, {512, 0}, {700, 100}, {511, 511}, {2000, 0}, {2500, 3}})
            for (const auto& [planes, blocks] : {std::pair{5, 9}, {7, 40}, {32, 132}, {90, 132}}) {
              const int keys = rows + more, diagonal = bottom_right ? more : 0;
              const Stream stream = plan_stream(planes, rows, keys, diagonal, left, right, groups, stages, blocks);
              if (stream.teams == 0) continue;
              ++streams;
              ASSERT_LE(stream.teams * stream.lag, blocks);
              // What the launch computes again from the plan.
              const Stream again =
                  plan_stream(planes, rows, keys, diagonal, left, right, groups, stages, stream.teams * stream.lag);
              ASSERT_TRUE(again.teams == stream.teams && again.lag == stream.lag);
              ASSERT_NO_FATAL_FAILURE(expect_complete(stream, planes)) << rows << " " << keys << " " << left << " " << right;
            }
  EXPECT_GT(streams, 200);
}

TEST(Stream, TakesLongWindowsAlone) {
  problem::Problem p{};
  p.batch = 1, p.heads = p.kv_heads = 16, p.rows = p.keys = 16384, p.head_dim = p.value_dim = 128;
  p.right = 0;
  const auto variant = [&] { return stream_variant(p, forward_variant(p), 132); };
  EXPECT_EQ(variant(), -1) << "no window";
  p.left = 1024;
  EXPECT_EQ(variant(), 6);
  p.softcap = 3;
  EXPECT_EQ(variant(), -1) << "softcap";
  p.softcap = 0;
  const int32_t starts[] = {0, 16384};
  p.cu_seqlens_q = p.cu_seqlens_k = starts;
  EXPECT_EQ(variant(), -1) << "packed";
  p.cu_seqlens_q = p.cu_seqlens_k = nullptr;
  p.left = 300;
  EXPECT_EQ(variant(), -1) << "few blocks a tile";
  p.left = 1024;
  p.rows = p.keys = 4096;
  EXPECT_EQ(variant(), -1) << "short rows";
  p.rows = p.keys = 16384;
  p.head_dim = p.value_dim = 64;
  EXPECT_EQ(variant(), 5);
  p.keys = 4096;
  EXPECT_EQ(variant(), -1) << "rows that see nothing";
}

}  // namespace
}  // namespace flash::sm90
