// common/sections.h: the order of the blocks of a flat grid. Planes (heads) are taken in sections whose walked rows fit the L2 cache
// together; inside a section the slot (a piece of a plane) runs slowest, so that all planes start with their first pieces.
#pragma once
#include <cstdint>

#include "cuda/common/divisor.h"

namespace flash::common {

struct Sections {
  Divisor blocks;               // of a section
  Divisor planes, last_planes;  // of a section; of the last one
  uint32_t whole = 0;           // sections before the last one

  Sections() = default;
  // all: planes there are, at least one; each has `slots`. walked_bytes: what the blocks of one plane read again and again.
  Sections(int64_t all, int64_t slots, int64_t walked_bytes) {
    constexpr int64_t kCacheBytes = int64_t{32} << 20;  // of an L2 cache of 40 to 60 MB
    int64_t section = kCacheBytes / (walked_bytes > 0 ? walked_bytes : 1);
    section = section < 1 ? 1 : section > all ? all : section;
    blocks = Divisor(section * slots);
    planes = Divisor(section);
    whole = static_cast<uint32_t>((all - 1) / section);
    last_planes = Divisor(all - whole * section);
  }

  struct Place {
    uint32_t plane, slot;
  };
  FLASH_HD Place find(uint32_t block) const {
    uint32_t rest, plane;
    const uint32_t section = blocks.divide(block, &rest);
    const uint32_t slot = (section < whole ? planes : last_planes).divide(rest, &plane);
    return {section * planes.value() + plane, slot};
  }
};

}  // namespace flash::common
