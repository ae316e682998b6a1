// sm90/divide.h: division by a number that the host knows, as one multiplication. Granlund & Montgomery 1994, "Division by Invariant
// Integers using Multiplication", section 4.
#pragma once
#include <cstdint>

#include "problem/portable.h"

namespace flash::sm90 {

// n / divisor for 0 <= n < 2^31. With s = ceil(log2 divisor), multiplier = ceil(2^(31 + s) / divisor) is off by less than 1, which
// n < 2^31 does not carry into the quotient.
struct Divide {
  int divisor = 1, shift = 31;
  uint32_t multiplier = uint32_t{1} << 31;

  Divide() = default;
  explicit Divide(int by) : divisor(by) {
    while (shift < 62 && (int64_t{1} << (shift - 31)) < by) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
  }

  FLASH_HD int operator()(int n) const { return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * multiplier >> shift); }
};

}  // namespace flash::sm90
