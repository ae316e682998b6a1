// problem/mask.h: which keys a row sees. The interval part only; bias, bool mask, ALiBi and softcap act on single scores.
#pragma once
#include "problem/portable.h"
#include "problem/problem.h"

namespace flash::problem {

// Keys [first, last) that rows see. first >= last: none.
struct Span {
  int64_t first, last;
};

enum class Cover : uint8_t { kSkip, kPartial, kFull };

// Row i sees keys [i + diagonal - left, i + diagonal + right], cut to [0, keys).
struct Interval {
  int64_t left, right, diagonal, keys;

  FLASH_HD Span row(int64_t i) const { return rows(i, i + 1); }

  // Keys that at least one of the rows [begin, end) sees.
  FLASH_HD Span rows(int64_t begin, int64_t end) const {
    const int64_t first = begin + diagonal - left;
    const int64_t last = end - 1 + diagonal + right + 1;
    return {first < 0 ? 0 : first, last < keys ? last : keys};
  }

  // Keys that every one of the rows [begin, end) sees.
  FLASH_HD Span common(int64_t begin, int64_t end) const {
    const int64_t first = end - 1 + diagonal - left;
    const int64_t last = begin + diagonal + right + 1;
    return {first < 0 ? 0 : first, last < keys ? last : keys};
  }

  // Rows [first, last) of a sequence of `count` rows that see at least one of the keys [begin, end).
  FLASH_HD Span viewers(int64_t begin, int64_t end, int64_t count) const {
    const int64_t first = begin - diagonal - right;
    const int64_t last = end - 1 - diagonal + left + 1;
    return {first < 0 ? 0 : first, last < count ? last : count};
  }

  FLASH_HD bool sees(int64_t i, int64_t key) const {
    return key >= i + diagonal - left && key <= i + diagonal + right && key < keys;
  }

  // A block of rows [row, row_end) x keys [key, key_end).
  FLASH_HD Cover cover(int64_t row, int64_t row_end, int64_t key, int64_t key_end) const {
    const Span any = rows(row, row_end);
    if (key >= any.last || key_end <= any.first || any.first >= any.last) return Cover::kSkip;
    const Span all = common(row, row_end);
    return key >= all.first && key_end <= all.last ? Cover::kFull : Cover::kPartial;
  }
};

FLASH_HD Interval interval(const Problem& p, int64_t rows, int64_t keys) {
  return {p.left, p.right, p.bottom_right ? keys - rows : 0, keys};
}

}  // namespace flash::problem
