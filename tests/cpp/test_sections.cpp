// Division by a product against division, and the order of a grid's blocks.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "cuda/common/sections.h"

namespace flash::common {
namespace {

TEST(Divisor, QuotientsAreThoseOfDivision) {
  constexpr uint32_t kLargest = (1u << 31) - 1;
  for (const uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 16u, 33u, 127u, 641u, 65535u, 65537u, 1000003u, kLargest - 1, kLargest})
    for (const uint32_t near : {0u, 1u, divisor, 2 * divisor, 1000 * divisor, kLargest / divisor * divisor, kLargest})
      for (int64_t n = int64_t{near} - 2; n <= int64_t{near} + 2; ++n) {
        if (n < 0 || n > kLargest) continue;
        uint32_t rest;
        EXPECT_EQ(Divisor(divisor).divide(static_cast<uint32_t>(n), &rest), n / divisor) << n << " / " << divisor;
        EXPECT_EQ(rest, n % divisor);
      }
}

TEST(Sections, EveryPlaceHasOneBlockAndPlanesRunFastest) {
  for (const int64_t planes : {1, 2, 7, 24})
    for (const int64_t slots : {1, 3, 8})
      for (const int64_t section : {1, 2, 5, 24}) {
        const Sections sections(planes, slots, (int64_t{32} << 20) / section);
        std::set<std::pair<uint32_t, uint32_t>> places;
        for (uint32_t block = 0; block < planes * slots; ++block) {
          const Sections::Place at = sections.find(block);
          EXPECT_LT(at.plane, planes);
          EXPECT_LT(at.slot, slots);
          places.insert({at.plane, at.slot});
        }
        EXPECT_EQ(places.size(), static_cast<size_t>(planes * slots));
        for (uint32_t block = 0; block < section && block < planes; ++block) {
          EXPECT_EQ(sections.find(block).plane, block);
          EXPECT_EQ(sections.find(block).slot, 0u);
        }
      }
}

}  // namespace
}  // namespace flash::common
