// sm90/forward_softmax.cuh: the softmax of 64 rows x kKeys scores in the accumulators of a warpgroup. A lane holds two rows:
// score[4 i + 2 r + e] is (lane / 4 + 8 r, 8 i + 2 (lane % 4) + e) of its warp's 16 rows.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "problem/softmax.h"

namespace flash::sm90 {

// The largest score of each row in this lane. NaN scores are passed over.
template <int kScores>
__device__ __forceinline__ void lane_max(const float (&score)[kScores], float (&maximum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top[2] = {fmaxf(score[2 * r], score[2 * r + 1]), fmaxf(score[4 + 2 * r], score[4 + 2 * r + 1])};
#pragma unroll
    for (int i = 2; i < kScores / 4; ++i) top[i & 1] = fmaxf(fmaxf(top[i & 1], score[4 * i + 2 * r]), score[4 * i + 2 * r + 1]);
    maximum[r] = fmaxf(top[0], top[1]);
  }
}

// Row maxima over all keys of the block, in every lane of the row's quad. NaN scores are passed over.
template <bool kMask, int kScores>
__device__ __forceinline__ void row_max(const float (&score)[kScores], float (&maximum)[2]) {
  if constexpr (kMask) {  // rows see few keys: some lane sees none or negative scores only, nearly always
    lane_max(score, maximum);
  } else {
    int bits[2][2];  // floats compared as integers, three at a time: right unless a lane holds negative scores only
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        bits[r][h] = max(__float_as_int(score[4 * h + 2 * r]), __float_as_int(score[4 * h + 2 * r + 1]));
#pragma unroll
      for (int i = 2; i < kScores / 4; ++i)
        bits[r][i & 1] =
            __vimax3_s32(bits[r][i & 1], __float_as_int(score[4 * i + 2 * r]), __float_as_int(score[4 * i + 2 * r + 1]));
      bits[r][0] = max(bits[r][0], bits[r][1]);
      maximum[r] = __int_as_float(bits[r][0]);
    }
    // A positive NaN is the largest integer: it takes the slow branch too, where fmaxf passes over it.
    constexpr int kInfinity = 0x7f800000;
    if (__any_sync(~0u, min(bits[0][0], bits[1][0]) < 0 || max(bits[0][0], bits[1][0]) > kInfinity)) lane_max(score, maximum);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(~0u, maximum[r], 1));
    maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(~0u, maximum[r], 2));
  }
}

// What this lane's two rows have folded so far. `top` is in units of the score; `sum` is this lane's share of the row's sum.
struct Rows {
  float top[2], sum[2];
  float peak[2];  // fp16 alone: the largest share of a block, which bounds every probability of this lane

  __device__ __forceinline__ void start(const float (&maximum)[2]) {
    top[0] = maximum[0], top[1] = maximum[1];
    peak[0] = peak[1] = 0;
    sum[0] = sum[1] = 0;
  }

  // Follows the row maxima, but only where they grow by more than 2^8. True: `factor` applies to the output.
  __device__ __forceinline__ bool follow(const float (&maximum)[2], float scale_log2, float (&factor)[2]) {
    if (!__any_sync(~0u, (maximum[0] - top[0]) * scale_log2 > 8.f || (maximum[1] - top[1]) * scale_log2 > 8.f)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float after = fmaxf(maximum[r], top[r]);
      factor[r] = top[r] == -INFINITY ? 0.f : ptx::exp2((top[r] - after) * scale_log2);
      top[r] = after;
      sum[r] *= factor[r];
    }
    return true;
  }

  // What the exponent subtracts: finite even for rows that saw nothing (problem/softmax.h); without kUnseen there are none.
  template <bool kUnseen = true>
  __device__ __forceinline__ void reference(float scale_log2, float (&subtrahend)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) subtrahend[r] = (kUnseen ? problem::Softmax<float>::reference(top[r]) : top[r]) * scale_log2;
  }
};

// Beyond this (log2 units) the rounding of a subtrahend, which fma(score, scale, -subtrahend) shows in full, may itself leave the range
// of 2^x. Such scores are scaled and reduced in two roundings, as the subtrahend was, so that the largest becomes 0 exactly.
inline constexpr float kLargest = 0x1p20f;

__device__ __forceinline__ bool any_large(const float (&subtrahend)[2]) {
  return __any_sync(~0u, fabsf(subtrahend[0]) > kLargest || fabsf(subtrahend[1]) > kLargest);
}

// Returns the scale that is left to apply.
template <int kScores>
__device__ __forceinline__ float reduce_large(float (&score)[kScores], float scale_log2, float (&subtrahend)[2]) {
  if (!any_large(subtrahend)) return scale_log2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) score[i] = __fsub_rn(__fmul_rn(score[i], scale_log2), subtrahend[(i >> 1) & 1]);
  subtrahend[0] = subtrahend[1] = 0;
  return 1;
}

// A sink joins both rows of a lane: their sums, their references `top` in log2 units, and `factor` for their outputs.
__device__ __forceinline__ void fold_sink(float logit, float (&sum)[2], float (&top)[2], float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    problem::Softmax<float> softmax{sum[r] == 0 ? -INFINITY : top[r], sum[r]};
    factor[r] = softmax.fold_sink(logit);
    sum[r] = softmax.sum, top[r] = softmax.max;
  }
}

// score -> 2^(score * scale_log2 - subtrahend) for the pairs [kBegin, kEnd); pairs [kPack, kEnd) also go packed into `probability`, the
// A operand of P V. Adds to the row sums.
template <class T, int kBegin, int kEnd, int kPack, int kScores>
__device__ __forceinline__ void exponentials(float (&score)[kScores], uint32_t (&probability)[kScores / 8][4], float scale_log2,
                                             const float (&subtrahend)[2], float (&sum)[2][2]) {
#pragma unroll
  for (int i = kPack; i < kBegin; ++i) probability[i / 4][i % 4] = ptx::pack(score[2 * i], score[2 * i + 1], T());
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) {
    const int r = i & 1;
    score[2 * i] = ptx::exp2(fmaf(score[2 * i], scale_log2, -subtrahend[r]));
    score[2 * i + 1] = ptx::exp2(fmaf(score[2 * i + 1], scale_log2, -subtrahend[r]));
    sum[r][0] += score[2 * i];
    sum[r][1] += score[2 * i + 1];
    if (i >= kPack) probability[i / 4][i % 4] = ptx::pack(score[2 * i], score[2 * i + 1], T());
  }
}

// Softcap: score -> tanh(score * cap_scale), as 1 - 2 / (e^2x + 1). Special functions bind here, so four scores of a row share a
// reciprocal, and with it a NaN: keys that the row does not see have to be masked before.
template <int kScores>
__device__ __forceinline__ void cap(float (&score)[kScores], float cap_scale) {
  static_assert(kScores % 8 == 0);
  const float unit = cap_scale * 2.f * problem::Softmax<float>::kLog2e;
  constexpr float kMost = 30;  // beyond, tanh is 1 in fp32; four factors of 2^30 do not overflow
#pragma unroll
  for (int i = 0; i < kScores; i += 8) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const own[4] = {score + i + 2 * r, score + i + 2 * r + 1, score + i + 2 * r + 4, score + i + 2 * r + 5};
      float e[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) e[j] = ptx::exp2(ptx::min_nan(*own[j] * unit, kMost)) + 1.f;
      const float low = e[0] * e[1], high = e[2] * e[3], all = ptx::reciprocal(low * high) * -2.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) *own[j] = fmaf(all * (j < 2 ? high : low), e[j ^ 1], 1.f);
    }
  }
}

// Which of a lane's keys of a row lie below `end`: bit 2 j + e is key 8 j + e, all counted from the lane's first key.
__device__ __forceinline__ uint32_t keys_below(int end) {
  const int from = max(end, 0), count = from / 8 * 2 + min(from % 8, 2);
  return ~__funnelshift_lc(0u, ~0u, count);
}

// `hidden` where the row does not see the key. first_row, first_key: of this lane, rows are 8 apart. One bit per key: ptxas turns eight
// of them into predicates at once (R2P), where comparisons would cost two instructions a score.
template <int kScores>
__device__ __forceinline__ void mask(float (&score)[kScores], int first_row, int first_key, int left, int right, int keys,
                                     float hidden = -INFINITY) {
  static_assert(kScores <= 64);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + 8 * r;
    const uint32_t seen = keys_below(min(keys, row + right + 1) - first_key) & ~keys_below(row - left - first_key);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      if ((seen & (1u << i)) == 0) score[4 * (i / 2) + 2 * r + i % 2] = hidden;
  }
}

}  // namespace flash::sm90
