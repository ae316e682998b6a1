// problem/coords.h: dense and packed sequences, heads, offsets.
#include <gtest/gtest.h>

#include <limits>

#include "problem/coords.h"

namespace flash::problem {
namespace {

TEST(Sequence, DenseIsTheWholeOfEachBatch) {
  Problem p;
  p.rows = 5;
  p.keys = 7;
  const Sequence s = sequence(p, 3);
  EXPECT_EQ(s.batch, 3);
  EXPECT_EQ(s.row, 0);
  EXPECT_EQ(s.key, 0);
  EXPECT_EQ(s.rows, 5);
  EXPECT_EQ(s.keys, 7);
}

TEST(Sequence, PackedComesFromTheLengths) {
  const int32_t q[] = {0, 4, 4, 9}, k[] = {2, 5, 6, 6};
  Problem p;
  p.cu_seqlens_q = q;
  p.cu_seqlens_k = k;
  p.total_rows = p.total_keys = 10;
  p.rows = p.keys = 5;
  EXPECT_EQ(sequence(p, 0).rows, 4);
  EXPECT_EQ(sequence(p, 0).key, 2);
  EXPECT_EQ(sequence(p, 0).keys, 3);
  EXPECT_EQ(sequence(p, 1).rows, 0);
  EXPECT_EQ(sequence(p, 2).row, 4);
  EXPECT_EQ(sequence(p, 2).rows, 5);
  EXPECT_EQ(sequence(p, 2).keys, 0);
  p.rows = 2;  // longer than the caller said: cut
  EXPECT_EQ(sequence(p, 2).rows, 2);
}

TEST(Sequence, BadLengthsStayInsideTheArrays) {
  const int32_t low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
  const int32_t bad[] = {-5, 100, 3, low, high, high, low, 7};
  Problem p;
  p.cu_seqlens_q = p.cu_seqlens_k = bad;
  p.total_rows = 10;
  p.total_keys = 6;
  p.rows = p.keys = 100;
  for (int64_t b = 0; b < 7; ++b) {
    const Sequence s = sequence(p, b);
    EXPECT_GE(s.row, 0);
    EXPECT_GE(s.rows, 0);
    EXPECT_LE(s.row + s.rows, p.total_rows);
    EXPECT_GE(s.key, 0);
    EXPECT_GE(s.keys, 0);
    EXPECT_LE(s.key + s.keys, p.total_keys);
  }
}

TEST(Offsets, AreSixtyFourBitSumsOfStrides) {
  Array a;
  a.batch = int64_t{1} << 33;
  a.head = 1000;
  a.row = 10;
  EXPECT_EQ(offset(a, 2, 3, 4), (int64_t{1} << 34) + 3040);
  Problem p;
  p.heads = 6;
  p.kv_heads = 2;
  for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(kv_head(p, h), h / 3);
  p.lse_batch = 60;
  p.lse_head = 10;
  EXPECT_EQ(lse_offset(p, 1, 2, 3), 83);
}

}  // namespace
}  // namespace flash::problem
