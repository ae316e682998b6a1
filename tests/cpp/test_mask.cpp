// problem/mask.h against the definition, row by row and key by key.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "problem/mask.h"

namespace flash::problem {
namespace {

bool sees(const Interval& m, int64_t i, int64_t j) {
  return j >= 0 && j < m.keys && j >= i + m.diagonal - m.left && j <= i + m.diagonal + m.right;
}

std::vector<Interval> intervals() {
  std::vector<Interval> all;
  for (int64_t left : {kOpen, int64_t{0}, int64_t{3}, int64_t{-2}})
    for (int64_t right : {kOpen, int64_t{0}, int64_t{2}, int64_t{-1}})
      for (int64_t diagonal : {0, 5, -4})
        for (int64_t keys : {0, 1, 7, 12}) all.push_back({left, right, diagonal, keys});
  return all;
}

TEST(Interval, RowsAndCommonAreUnionAndIntersection) {
  for (const Interval& m : intervals())
    for (int64_t begin = 0; begin < 10; ++begin)
      for (int64_t end = begin + 1; end <= 10; ++end) {
        const Span any = m.rows(begin, end), all = m.common(begin, end);
        for (int64_t j = 0; j < m.keys; ++j) {
          bool some = false, every = true;
          for (int64_t i = begin; i < end; ++i) {
            EXPECT_EQ(m.sees(i, j), sees(m, i, j));
            some |= sees(m, i, j);
            every &= sees(m, i, j);
          }
          EXPECT_EQ(every, j >= all.first && j < all.last);
          if (some) {
            EXPECT_TRUE(j >= any.first && j < any.last);
          }
        }
        if (any.first < any.last) {  // tight at both ends where no row lies wholly outside
          EXPECT_GE(any.first, 0);
          EXPECT_LE(any.last, m.keys);
        }
      }
}

TEST(Interval, ViewersAreTheRowsThatSeeSomeKey) {
  for (const Interval& m : intervals())
    for (int64_t begin = 0; begin < m.keys; ++begin)
      for (int64_t end = begin + 1; end <= m.keys; ++end) {
        const Span rows = m.viewers(begin, end, 10);
        for (int64_t i = 0; i < 10; ++i) {
          bool some = false;
          for (int64_t j = begin; j < end; ++j) some |= sees(m, i, j);
          if (some) {
            EXPECT_TRUE(i >= rows.first && i < rows.last);
          }
        }
      }
}

TEST(Interval, CoverNeverSkipsASeenKeyNorCallsAHiddenOneFull) {
  for (const Interval& m : intervals())
    for (int64_t row = 0; row < 8; row += 2)
      for (int64_t key = 0; key < 12; key += 3) {
        bool some = false, every = true;
        for (int64_t i = row; i < row + 2; ++i)
          for (int64_t j = key; j < key + 3; ++j) {
            some |= sees(m, i, j);
            every &= sees(m, i, j);
          }
        const Cover cover = m.cover(row, row + 2, key, key + 3);
        if (some) {
          EXPECT_NE(cover, Cover::kSkip);
        }
        EXPECT_EQ(cover == Cover::kFull, every);
      }
}

TEST(Interval, OfAProblem) {
  Problem p;
  EXPECT_EQ(interval(p, 3, 8).diagonal, 0);
  p.bottom_right = true;
  p.right = 0;
  const Interval m = interval(p, 3, 8);
  EXPECT_EQ(m.diagonal, 5);
  EXPECT_EQ(m.row(0).last, 6);
  EXPECT_EQ(m.row(2).last, 8);
  EXPECT_EQ(m.row(0).first, 0);
  EXPECT_GE(interval(p, 8, 3).row(0).first, interval(p, 8, 3).row(0).last);  // more rows than keys: the first see nothing
}

}  // namespace
}  // namespace flash::problem
