// common/divisor.h: division of block indices by what only the host knows, as a product and a shift. A block starts with several of
// them, one after the other, before its first load: 1 % of the time of a block with few tiles.
#pragma once
#include <cstdint>

#include "problem/portable.h"

namespace flash::common {

// Quotients of n < 2^31 by a divisor of up to 2^31; 0 counts as 1. The multiplier is 2^shift / divisor, rounded up (Granlund &
// Montgomery 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t divisor) : divisor_(divisor > 1 ? static_cast<uint32_t>(divisor) : 1) {
    while ((uint64_t{1} << (shift_ - 31)) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor_ - 1) / divisor_);
  }

  FLASH_HD uint32_t divide(uint32_t n) const { return static_cast<uint32_t>((uint64_t{n} * multiplier_) >> shift_); }
  FLASH_HD uint32_t divide(uint32_t n, uint32_t* rest) const {
    const uint32_t quotient = divide(n);
    *rest = n - quotient * divisor_;
    return quotient;
  }
  FLASH_HD uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_ = 1, multiplier_ = 1u << 31, shift_ = 31;
};

}  // namespace flash::common
