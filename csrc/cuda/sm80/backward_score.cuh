// sm80/backward_score.cuh: from scores and dP to probabilities and dS, on accumulators in registers.
//   P = 2^(score - lse2); W = P where dropout keeps, / (1 - p): what multiplied V
//   dX = P (dP' - delta), dP' = dP where dropout keeps, / (1 - p): gradient of the score after all modifiers, that is of the mask
//   dS = dX (1 - tanh^2) with a softcap, else dX: gradient of scale q.k
// Both orientations: kTransposed where keys are the lines of the accumulator.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/backward_block.cuh"
#include "cuda/tile/reduce.cuh"

namespace flash::sm80 {

// lse2 and delta of a pair of elements.
struct Statistics {
  float lse2[2], delta[2];
};

// What the modifiers of a tile depend on.
struct ScoreContext {
  const BackwardCall& call;
  const problem::Sequence& sequence;
  const problem::Interval& interval;
  const problem::Dropout& dropout;
  int64_t batch, head;  // of the query heads
  bool border;          // the tile is PARTIAL
  int lane;
};

template <int kI, int kJ>
using Packed = uint32_t[kI][kJ / 2][4];

// The pair (j, half) of line block i of an accumulator, in its packed form.
template <int kI, int kJ>
__device__ __forceinline__ uint32_t& pair_of(uint32_t (&r)[kI][kJ][4], int i, int j, int half) {
  return r[i][j / 2][(j & 1) * 2 + half];
}

// statistics(i, j, half) -> Statistics of that pair.
template <class T, int kI, int kJ, class Find>
__device__ __forceinline__ void weigh_plain(const float (&rScore)[kI][kJ][4], const float (&rGradient)[kI][kJ][4],
                                            uint32_t (&rWeight)[kI][kJ / 2][4], uint32_t (&rScoreGradient)[kI][kJ / 2][4],
                                            float log2_scale, Find statistics) {
#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Statistics at = statistics(i, j, half);
        float p[2], ds[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          p[f] = ptx::exp2(fmaf(rScore[i][j][2 * half + f], log2_scale, -at.lse2[f]));
          ds[f] = p[f] * (rGradient[i][j][2 * half + f] - at.delta[f]);
        }
        pair_of(rWeight, i, j, half) = ptx::pack(p[0], p[1], T());
        pair_of(rScoreGradient, i, j, half) = ptx::pack(ds[0], ds[1], T());
      }
}

// Adds a fragment of dX to the gradient of the mask; where the mask is broadcast, sums over the warp first. Hidden elements are 0.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void add_mask_gradient(const float (&r)[kI][kJ][4], const ScoreContext& c, const common::Place& at) {
  const problem::Gradients& g = c.call.gradients;
  float* gMask = static_cast<float*>(g.dmask) + c.batch * g.dmask_batch + c.head * g.dmask_head + at.row * g.dmask_row +
                 at.key * g.dmask_key;
  const int64_t line_stride = kTransposed ? g.dmask_key : g.dmask_row, column_stride = kTransposed ? g.dmask_row : g.dmask_key;
  const auto add = [&](int line, int column, float x) {
    if (x != 0) ptx::reduce_add(gMask + line * line_stride + column * column_stride, x);
  };
  if (line_stride != 0 && column_stride != 0) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) add(at.line + i * 16 + e / 2 * 8, at.column + j * 8 + e % 2, r[i][j][e]);
  } else if (line_stride != 0) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kJ; ++j) sum += r[i][j][2 * half] + r[i][j][2 * half + 1];
        sum = tile::quad_sum(sum);
        if ((c.lane & 3) == 0) add(at.line + i * 16 + half * 8, 0, sum);
      }
  } else {
    float total = 0;
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kI; ++i) sum += r[i][j][f] + r[i][j][2 + f];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(tile::kWarp, sum, i);
        if (column_stride != 0 && c.lane < 4) add(0, at.column + j * 8 + f, sum);
        total += sum;
      }
    if (column_stride == 0) {
      total = tile::quad_sum(total);
      if (c.lane == 0) add(0, 0, total);
    }
  }
}

template <bool kTransposed, class T, int kI, int kJ, class Find>
__device__ __forceinline__ void weigh_general(float (&rScore)[kI][kJ][4], float (&rGradient)[kI][kJ][4],
                                              uint32_t (&rWeight)[kI][kJ / 2][4], uint32_t (&rScoreGradient)[kI][kJ / 2][4],
                                              const ScoreContext& c, const common::Place& at, Find statistics) {
  const problem::Problem& p = c.call.problem;
  const common::Modifiers& m = c.call.modifiers;
  const bool capped = m.flags & common::kSoftcap, dropped = m.flags & common::kDropout;

  const float log2_scale = common::cap<T>(rScore, m);
  uint32_t rSlope[kI][kJ / 2][4];  // 1 - tanh^2 as pairs of fp16: finer than what dS is rounded to
  if (capped) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = rScore[i][j][2 * half], high = rScore[i][j][2 * half + 1];
          pair_of(rSlope, i, j, half) = ptx::pack(fmaf(-low, low, 1.f), fmaf(-high, high, 1.f), __half());
        }
  }
  common::add_modifiers<kTransposed, T>(rScore, p, m, c.batch, c.head, c.sequence.rows, c.interval, at, log2_scale);
  if (c.border) common::hide<kTransposed>(rScore, c.interval, c.sequence.rows, at);

#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Statistics of = statistics(i, j, half);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float& x = rScore[i][j][2 * half + f];
          x = ptx::exp2(fmaf(x, log2_scale, -of.lse2[f]));
        }
      }
  if (dropped) {
    // A dropped probability keeps its value, with a minus sign: dX still needs it.
    common::for_dropout<kTransposed, kI, kJ>(c.dropout, c.batch * p.heads + c.head, at, c.lane, [&](int i, int j, int e, bool kept) {
      float& x = rScore[i][j][e];
      x = kept ? x : -x;
      rGradient[i][j][e] = kept ? rGradient[i][j][e] * m.keep_scale : 0.f;
    });
  }
#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Statistics of = statistics(i, j, half);
        float weight[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float& x = rScore[i][j][2 * half + f];
          weight[f] = x;
          if (dropped) weight[f] = __float_as_int(x) < 0 ? 0.f : x * m.keep_scale;
          x = fabsf(x) * (rGradient[i][j][2 * half + f] - of.delta[f]);
        }
        pair_of(rWeight, i, j, half) = ptx::pack(weight[0], weight[1], T());
      }
  if (c.call.gradients.dmask != nullptr) {
    if (c.border) common::hide<kTransposed>(rScore, c.interval, c.sequence.rows, at, 0.f);
    add_mask_gradient<kTransposed>(rScore, c, at);
  }
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low = rScore[i][j][2 * half], high = rScore[i][j][2 * half + 1];
        if (capped) {
          const uint32_t slope = pair_of(rSlope, i, j, half);
          const float2 factor = __half22float2(*reinterpret_cast<const __half2*>(&slope));
          low *= factor.x;
          high *= factor.y;
        }
        pair_of(rScoreGradient, i, j, half) = ptx::pack(low, high, T());
      }
}

}  // namespace flash::sm80
