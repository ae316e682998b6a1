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

// In place: scores become dS, dP becomes P. statistics(i, j, half) -> Statistics of that pair.
template <int kI, int kJ, class Find>
__device__ __forceinline__ void weigh_plain(float (&rScore)[kI][kJ][4], float (&rGradient)[kI][kJ][4], float log2_scale,
                                            Find statistics) {
#pragma unroll
  for (int j = 0; j < kJ; ++j)
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Statistics at = statistics(i, j, half);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float &score = rScore[i][j][2 * half + f], &gradient = rGradient[i][j][2 * half + f];
          const float probability = ptx::exp2(fmaf(score, log2_scale, -at.lse2[f]));
          score = probability * (gradient - at.delta[f]);
          gradient = probability;
        }
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

// 1 - tanh^2 of a fragment, at the accuracy of T's gradients: pairs of fp16 where those are 16 bits wide.
template <class T, int kI, int kJ>
class CapSlope {
 public:
  // r: tanh of the scores.
  __device__ __forceinline__ void keep(const float (&r)[kI][kJ][4]) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        float slope[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) slope[e] = fmaf(-r[i][j][e], r[i][j][e], 1.f);
        if constexpr (kNarrow) {
          words_[i][j][0] = ptx::pack(slope[0], slope[1], __half());
          words_[i][j][1] = ptx::pack(slope[2], slope[3], __half());
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) words_[i][j][e] = __float_as_uint(slope[e]);
        }
      }
  }

  __device__ __forceinline__ void multiply(float (&r)[kI][kJ][4]) const {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kNarrow) {
            const uint32_t word = words_[i][j][e / 2] >> (e % 2 * 16);
            r[i][j][e] *= __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
          } else {
            r[i][j][e] *= __uint_as_float(words_[i][j][e]);
          }
        }
  }

 private:
  static constexpr bool kNarrow = sizeof(T) == 2;
  uint32_t words_[kI][kJ][kNarrow ? 2 : 4];
};

// The same with every feature. T: the element type.
template <bool kTransposed, class T, int kI, int kJ, class Find>
__device__ __forceinline__ void weigh_general(float (&rScore)[kI][kJ][4], float (&rGradient)[kI][kJ][4], const ScoreContext& c,
                                              const common::Place& at, Find statistics) {
  const problem::Problem& p = c.call.problem;
  const common::Modifiers& m = c.call.modifiers;
  const bool capped = m.flags & common::kSoftcap, dropped = m.flags & common::kDropout;

  const float log2_scale = common::cap<T>(rScore, m);
  CapSlope<T, kI, kJ> slope;
  if (capped) slope.keep(rScore);
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
    common::for_dropout<kTransposed, kI, kJ>(c.dropout, c.batch * p.heads + c.head, at, c.lane,
                                             [&](int i, int j, int e, bool kept) {
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
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float &x = rScore[i][j][2 * half + f], &gradient = rGradient[i][j][2 * half + f];
          float weight = x;
          if (dropped) weight = __float_as_int(x) < 0 ? 0.f : x * m.keep_scale;
          x = fabsf(x) * (gradient - of.delta[f]);
          gradient = weight;
        }
      }
  if (c.call.gradients.dmask != nullptr) {
    if (c.border) common::hide<kTransposed>(rScore, c.interval, c.sequence.rows, at, 0.f);
    add_mask_gradient<kTransposed>(rScore, c, at);
  }
  if (capped) slope.multiply(rScore);
}

}  // namespace flash::sm80
