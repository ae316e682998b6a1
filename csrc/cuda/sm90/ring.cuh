// sm90/ring.cuh: a place in a ring of buffers that a producer fills and consumers empty.
#pragma once
#include <cstdint>

namespace flash::sm90 {

// A stage of a ring and the parity of its current phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ int stage_before() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ __forceinline__ uint32_t parity_before() const { return stage == 0 ? parity ^ 1 : parity; }
  __device__ __forceinline__ void advance(int count) {
    stage += count;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace flash::sm90
