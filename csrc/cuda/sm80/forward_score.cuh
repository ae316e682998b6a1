// sm80/forward_score.cuh: what a call asks of the scores and the probabilities of a block's tile, for the forward kernels on tensor cores.
// kPlain: an instance whose calls ask for nothing.
#pragma once
#include "cuda/common/score.cuh"
#include "cuda/sm80/forward_block.cuh"

namespace flash::sm80 {

// Scores as the softmax takes them, but for hidden ones. Returns log2 units per unit of them.
template <bool kPlain, class T, int kI, int kJ, class Rows>
__device__ __forceinline__ float modify(float (&rScore)[kI][kJ][4], const ForwardCall& call, const Rows& block,
                                        const common::Place& at, const common::MaskAhead<T, kI, kJ>& mask) {
  float log2_scale = call.modifiers.scale * common::kLog2e;
  if constexpr (!kPlain)
    if (call.modifiers.flags & common::kChangesScore)
      log2_scale = common::modify<T>(rScore, call.problem, call.modifiers, block.sequence.batch, block.head,
                                     block.sequence.rows, block.interval, at, mask);
  return log2_scale;
}

// Dropped probabilities become 0.
template <bool kPlain, int kI, int kJ, class Rows>
__device__ __forceinline__ void drop(float (&rProbability)[kI][kJ][4], const ForwardCall& call, const Rows& block,
                                     const problem::Dropout& dropout, const common::Place& at, int lane) {
  if constexpr (!kPlain)
    if (call.modifiers.flags & common::kDropout)
      common::drop<false>(rProbability, dropout, block.batch * call.problem.heads + block.head, at, lane);
}

}  // namespace flash::sm80
