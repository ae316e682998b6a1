// sm90/key_walk.cuh: the walk of a warpgroup's 64 rows over the blocks of keys that they see, newest first. Blocks that hold the diagonal
// or the end of the keys are masked, those between are not, those at the left edge of a window are again.
#pragma once
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

// The blocks that are left: `block` down to masked_end, on to unmasked_end, on to end. To be made uniform (ptx::uniform): uniform bounds
// make uniform loops, in which the stages of the rings stay in uniform registers and with them all descriptors.
struct KeyWalk {
  int block, masked_end, unmasked_end, end;

  // Each of the three takes a block.
  template <class Newest, class Unmasked, class Oldest>
  __device__ __forceinline__ void run(const Newest& newest, const Unmasked& unmasked, const Oldest& oldest) {
#pragma unroll 1
    for (; block >= masked_end; --block) newest(block);
#pragma unroll 1
    for (; block >= unmasked_end; --block) unmasked(block);
#pragma unroll 1
    for (; block >= end; --block) oldest(block);
  }
};

// The left edge of the mask, for rows of which the first stands at `top` on the axis of keys: the oldest block of which any of them sees
// a key, and the oldest that reaches no further left than all of them see.
template <int kKeys>
__device__ __forceinline__ int oldest_seen(const ForwardArguments& p, int top) {
  return max(top - p.left, 0) / kKeys;
}
template <int kKeys>
__device__ __forceinline__ int oldest_unmasked(const ForwardArguments& p, int top) {
  return (max(top + 63 - p.left, 0) + kKeys - 1) / kKeys;
}

}  // namespace flash::sm90
