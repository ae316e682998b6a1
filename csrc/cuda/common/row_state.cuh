// common/row_state.cuh: the online softmax of the query rows whose scores a warp holds in its accumulators.
#pragma once
#include <type_traits>

#include "cuda/common/score.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/reduce.cuh"
#include "problem/softmax.h"

namespace flash::common {

// Largest sum of probabilities that a fixed reference may lead to: P must fit its 16-bit type, and the sums fp32.
template <class T>
inline constexpr float kSumLimit = std::is_same_v<T, __half> ? 6e4f : 1.8446744e19f;

// Beyond this (log2 units) the rounding of a maximum, which fma(score, scale, -max) shows in full, may itself leave the range of 2^x.
inline constexpr float kLargestMax = 0x1p20f;
__device__ __forceinline__ bool is_large(float max) { return fabsf(max) > kLargestMax && max != -INFINITY; }

// kBlocks blocks of 16 rows; [i][half] is row 16 i + 8 half + lane / 4, the same in the four lanes of a quad.
template <int kBlocks>
struct RowState {
  float max[kBlocks][2];  // in log2 units
  float sum[kBlocks][2];  // this lane's share until close()

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      max[i][0] = max[i][1] = -INFINITY;
      sum[i][0] = sum[i][1] = 0;
    }
  }

  // The maximum of row (i, half) becomes `after`; its sum and output follow.
  template <int kN>
  __device__ __forceinline__ void raise(int i, int half, float after, float (&rOut)[kBlocks][kN][4]) {
    const float factor = problem::Softmax<float>::rescale(max[i][half], after);
    max[i][half] = after;
    sum[i][half] *= factor;
    tile::scale_line(rOut, i, half, factor);
  }

  // Takes in the maxima of scores [rows, 8 kJ].
  template <int kJ, int kN>
  __device__ __forceinline__ void fold_max(const float (&rScore)[kBlocks][kJ][4], float log2_scale,
                                           float (&rOut)[kBlocks][kN][4]) {
    bool grows = false;
    float after[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        after[i][half] = fmaxf(max[i][half], tile::quad_max(tile::line_max(rScore, i, half)) * log2_scale);
        grows |= after[i][half] > max[i][half];
      }
    if (!__any_sync(tile::kWarp, grows)) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) raise(i, half, after[i][half], rOut);
  }

  // Scores under large maxima: scaled and reduced in two roundings, as the maximum was, so that the largest becomes 0 exactly.
  template <int kJ>
  __device__ __forceinline__ void reduce(float (&rScore)[kBlocks][kJ][4], float log2_scale) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          rScore[i][j][e] =
              __fsub_rn(__fmul_rn(rScore[i][j][e], log2_scale), problem::Softmax<float>::reference(max[i][e / 2]));
  }

  __device__ __forceinline__ bool any_large() const {
    bool large = false;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) large |= is_large(max[i][0]) || is_large(max[i][1]);
    return large;
  }

  // Scores become probabilities relative to 2^max and join the sums.
  template <int kJ>
  __device__ __forceinline__ void exponentiate(float (&rScore)[kBlocks][kJ][4], float log2_scale) {
    const bool reduced = __any_sync(tile::kWarp, any_large());
    if (reduced) {
      reduce(rScore, log2_scale);
      log2_scale = 1;
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = reduced ? 0.f : problem::Softmax<float>::reference(max[i][half]);
        float share = 0;
#pragma unroll
        for (int j = 0; j < kJ; ++j)
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            float& x = rScore[i][j][2 * half + f];
            x = ptx::exp2(fmaf(x, log2_scale, -reference));
            share += x;
          }
        sum[i][half] += share;
      }
  }

  // The same for one score under a maximum that a visible key has set.
  __device__ __forceinline__ void exponentiate(float& x, int i, int half, float log2_scale) {
    x = ptx::exp2(fmaf(x, log2_scale, -max[i][half]));
    sum[i][half] += x;
  }

  // Adds the lanes' shares up. True if a fixed reference was no good: a sum is NaN or outside [0, limit), or a maximum is large.
  __device__ __forceinline__ bool close(float limit) {
    bool bad = any_large();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[i][half] = tile::quad_sum(sum[i][half]);
        bad |= !(sum[i][half] < limit);
      }
    return bad;
  }
};

}  // namespace flash::common
