// cuda/common/divisor.h: the quotient of every kind of divisor, at the ends of its range and at random.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "cuda/common/divisor.h"

namespace {

using flash::common::Divisor;

constexpr int kLargest = std::numeric_limits<int>::max();

TEST(Divisor, EndsOfTheRange) {
  for (const int divisor : {1, 2, 3, 5, 7, 127, 128, 1000, 65535, 65536, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, kLargest}) {
    const Divisor by(divisor);
    for (const uint32_t n :
         {0, 1, divisor - 1, divisor, kLargest / divisor * divisor - 1, kLargest / divisor * divisor, kLargest})
      EXPECT_EQ(by.divide(n), n / divisor) << n << " / " << divisor;
  }
  EXPECT_EQ(Divisor().divide(kLargest), kLargest);
  EXPECT_EQ(Divisor(0).divide(kLargest), kLargest);
}

TEST(Divisor, Random) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> bits(0, 30);
  for (int i = 0; i < 200'000; ++i) {
    const int divisor = static_cast<int>((random() >> 1) >> bits(random)) | 1,
              n = static_cast<int>((random() >> 1) >> bits(random));
    ASSERT_EQ(Divisor(divisor).divide(n), n / divisor) << n << " / " << divisor;
  }
}

}  // namespace
