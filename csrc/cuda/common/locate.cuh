// common/locate.cuh: which sequence a block of a flat grid works on.
// Dense: block index -> (plane, piece) by division. Packed: the lengths are on the device only. Sequence b's pieces of `unit` rows
// start at slot start(b) = cu_seqlens[b] / unit + b, so total / unit + batch slots hold all of them with no two sharing a slot, and the
// sequence of a slot is found by search. Slots between two sequences are idle.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "problem/coords.h"
#include "problem/problem.h"

namespace flash::common {

// Pieces per plane, where a plane is one (sequence, head) when dense and one head of all sequences when packed.
inline int64_t pieces(const int32_t* cu_seqlens, int64_t longest, int64_t total, int64_t batch, int64_t unit) {
  return cu_seqlens == nullptr ? (longest + unit - 1) / unit : total / unit + batch;
}
inline int64_t planes(const problem::Problem& p, int64_t heads) { return p.packed() ? heads : p.batch * heads; }

// The last sequence that starts at or before `slot`. 32 candidates at a time, one per lane: whole warps call it.
__device__ __forceinline__ int64_t find_sequence(const int32_t* cu_seqlens, int64_t batch, int64_t unit, int64_t slot) {
  const int lane = threadIdx.x & 31;
  int64_t low = 0, count = batch;
  while (count > 1) {
    const int64_t stride = (count + 31) / 32, candidate = low + lane * stride;
    const bool before = candidate < low + count && cu_seqlens[candidate] / unit + candidate <= slot;
    const int64_t passed = __popc(__ballot_sync(0xffffffffu, before));
    const int64_t next = low + (passed > 1 ? passed - 1 : 0) * stride;
    count = next + stride < low + count ? stride : low + count - next;
    low = next;
  }
  return low;
}

// Piece `slot` of a plane: fills batch (dense: from the plane; packed: by search) and returns the piece's index in its sequence.
__device__ __forceinline__ int64_t find_piece(const int32_t* cu_seqlens, int64_t count, int64_t unit, int64_t slot,
                                              int64_t* batch) {
  if (cu_seqlens == nullptr) return slot;
  *batch = find_sequence(cu_seqlens, count, unit, slot);
  return slot - (cu_seqlens[*batch] / unit + *batch);
}

}  // namespace flash::common
