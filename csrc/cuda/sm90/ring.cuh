// sm90/ring.cuh: a ring of buffers that a producer fills and consumers empty: a place in it, and the two barriers of a stage.
#pragma once
#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace flash::sm90 {

// The two barriers of a stage: it is full after `writers` arrivals, empty after `readers`.
__device__ __forceinline__ void init_stage(uint32_t full, uint32_t writers, uint32_t empty, uint32_t readers) {
  ptx::init_barrier(full, writers);
  ptx::init_barrier(empty, readers);
}

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
