// common/score.cuh: what acts on single scores between S = Q K^T and the softmax, and dropout after it, on fragments in registers.
// Used by forward (lines of the accumulator are rows, columns are keys) and by backward's S^T (kTransposed: lines are keys).
// Scores stay in the units of the product: modifiers are added divided by the scale, so that the exponential's multiply-add
// still does the scaling. Every branch is uniform over the block.
#pragma once
#include "cuda/common/modifiers.h"
#include "cuda/common/place.cuh"
#include "cuda/common/score_mask.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/reduce.cuh"
#include "problem/mask.h"
#include "problem/philox.h"
#include "problem/problem.h"

namespace flash::common {

// Hides what the interval does not show, and rows (transposed only) and keys past the end.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void hide(float (&s)[kI][kJ][4], const problem::Interval& interval, int64_t rows, const Place& at,
                                     float hidden = -INFINITY) {
  const int64_t corner = at.key - at.row - interval.diagonal;  // key - row, measured from the diagonal
  const int above = narrow(kTransposed ? corner + interval.left : interval.right - corner);   // column <= line + above
  const int below = narrow(kTransposed ? corner - interval.right : -interval.left - corner);  // column >= line + below
  const int columns = narrow(kTransposed ? rows - at.row : interval.keys - at.key);
  const int lines = narrow(kTransposed ? interval.keys - at.key : rows - at.row);
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = at.line + i * 16 + half * 8;
      int last = min(line + above, columns - 1) - at.column;
      const int first = line + below - at.column;
      if (kTransposed && line >= lines) last = -1;
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int f = 0; f < 2; ++f)
          if (j * 8 + f > last || j * 8 + f < first) s[i][j][2 * half + f] = hidden;
    }
}

// tanh to the accuracy that T needs.
template <class T>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 2) {
    return fmaf(-2.f, ptx::reciprocal(ptx::exp2(x * (2 * kLog2e)) + 1.f), 1.f);
  } else {
    return tanhf(x);
  }
}

// First step: softcap (scores become tanh, in [-1, 1]) or a scale that cannot be folded.
// Returns log2 units per unit of the scores that leave.
template <class T, int kI, int kJ>
__device__ __forceinline__ float cap(float (&s)[kI][kJ][4], const Modifiers& m) {
  if (!(m.flags & (kSoftcap | kScaleFirst))) return m.scale * kLog2e;
  const bool capped = m.flags & kSoftcap;
  const float factor = capped ? m.scale / m.softcap : m.scale;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] *= factor;
  if (!capped) return kLog2e;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = tanh_of<T>(s[i][j][e]);
  return m.softcap * kLog2e;
}

// -slope |row + diagonal - key|; slope in units of the scores. Distances are exact up to 2^24.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void add_alibi(float (&s)[kI][kJ][4], float slope, int64_t diagonal, const Place& at) {
  const int64_t corner = kTransposed ? at.key - at.row - diagonal : at.row + diagonal - at.key;  // |line + corner - column|
  const int base = narrow(corner) + at.line - at.column;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float distance = static_cast<float>(base + i * 16 + half * 8);
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float& x = s[i][j][2 * half + f];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(j * 8 + f)), x);
        }
    }
}

__device__ __forceinline__ float alibi_slope(const problem::Problem& p, int64_t batch, int64_t head) {
  return static_cast<const float*>(p.alibi_slopes)[batch * p.alibi_batch + head];
}

// Second step: ALiBi, then the mask, in units of scores of which one is `log2_scale` log2 units. T: dtype of the query.
template <bool kTransposed, class T, int kI, int kJ>
__device__ __forceinline__ void add_modifiers(float (&s)[kI][kJ][4], const problem::Problem& p, const Modifiers& m,
                                              int64_t batch, int64_t head, int64_t rows, const problem::Interval& interval,
                                              const Place& at, float log2_scale) {
  const float unit = kLog2e / log2_scale;
  if (m.flags & kAlibi) {
    add_alibi<kTransposed>(s, alibi_slope(p, batch, head) * unit, interval.diagonal, at);
  }
  if (m.flags & (kFloatMask | kBoolMask)) add_mask<kTransposed, T>(s, p.mask, batch, head, rows, interval.keys, unit, at);
}

// Both steps of forward. Returns log2 units per unit of the scores that leave.
template <class T, int kI, int kJ>
__device__ __forceinline__ float modify(float (&s)[kI][kJ][4], const problem::Problem& p, const Modifiers& m, int64_t batch,
                                        int64_t head, int64_t rows, const problem::Interval& interval, const Place& at,
                                        const MaskAhead<T, kI, kJ>& ahead) {
  const float log2_scale = cap<T>(s, m);
  if (ahead.here()) {
    if (m.flags & kAlibi) add_alibi<false>(s, alibi_slope(p, batch, head) * (kLog2e / log2_scale), interval.diagonal, at);
    ahead.add(s, kLog2e / log2_scale);
  } else {
    add_modifiers<false, T>(s, p, m, batch, head, rows, interval, at, log2_scale);
  }
  return log2_scale;
}

// Calls use(i, j, e, kept) for every element of a fragment whose first line and column are multiples of 16.
// Forward: one Philox call serves the lane's 8 elements of a 16 x 16 patch. Transposed: those 8 belong to two other lanes, one for
// each parity of the row; their words come by shuffles, so whole warps must call this.
template <bool kTransposed, int kI, int kJ, class Use>
__device__ __forceinline__ void for_dropout(const problem::Dropout& dropout, int64_t plane, const Place& at, int lane,
                                            Use use) {
  const int64_t line_patch = ((kTransposed ? at.key : at.row) >> 4) + (at.line >> 4);
  const int64_t column_patch = ((kTransposed ? at.row : at.key) >> 4) + (at.column >> 4);
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int t = 0; t < kJ / 2; ++t) {
      if constexpr (!kTransposed) {
        const problem::Philox r = dropout.draw(plane, line_patch + i, column_patch + t, lane);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          use(i, 2 * t + w / 2, 2 * (w % 2), (r.word[w] & 0xffffu) < dropout.keep);
          use(i, 2 * t + w / 2, 2 * (w % 2) + 1, (r.word[w] >> 16) < dropout.keep);
        }
      } else {
        const problem::Philox r = dropout.draw(plane, column_patch + t, line_patch + i, lane);
        const int key = tile::lane_line(lane), row = tile::lane_column(lane);  // inside an 8 x 8 quarter
#pragma unroll
        for (int f = 0; f < 2; ++f)
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t word = __shfl_sync(tile::kWarp, r.word[w], (row + f) * 4 + key / 2);
            use(i, 2 * t + w % 2, 2 * (w / 2) + f, ((key & 1) ? word >> 16 : word & 0xffffu) < dropout.keep);
          }
      }
    }
}

// Probabilities after the softmax sum: dropped ones become 0.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void drop(float (&p)[kI][kJ][4], const problem::Dropout& dropout, int64_t plane, const Place& at,
                                     int lane) {
  for_dropout<kTransposed, kI, kJ>(dropout, plane, at, lane, [&](int i, int j, int e, bool kept) {
    if (!kept) p[i][j][e] = 0;
  });
}

}  // namespace flash::common
