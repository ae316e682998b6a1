// problem/softmax.h: the online softmax, the one place that knows how empty and infinite values behave.
// A row is summarised by (max, sum): the largest score seen, in log2 units, and sum = sum of 2^(score - max).
// Rules: a masked score is -inf. A row that saw nothing has max -inf, sum 0, output 0, lse -inf. A NaN score makes sum NaN
// and stays NaN. Milakov & Gimelshein 2018 (online normaliser); Dao et al. 2022, algorithm 1 (fold, merge).
#pragma once
#include <cmath>

#include "problem/portable.h"

namespace flash::problem {

template <class Real>
struct Softmax {
  static constexpr Real kLog2e = Real(1.4426950408889634073599246810019);
  static constexpr Real kLn2 = Real(0.69314718055994530941723212145818);

  Real max = -INFINITY;
  Real sum = 0;

  // What to subtract from scores before the exponential: finite even when nothing was seen, so -inf - (-inf) never happens.
  static FLASH_HD Real reference(Real max) { return max == -Real(INFINITY) ? Real(0) : max; }

  // Factor for everything accumulated under `before` once the maximum is `after`. Exactly 1 where it did not move.
  static FLASH_HD Real rescale(Real before, Real after) {
    return before == after ? Real(1) : before == -Real(INFINITY) ? Real(0) : exp2(before - after);
  }

  // Takes in a block whose maximum is block_max; returns the factor for the accumulated output.
  FLASH_HD Real fold_max(Real block_max) {
    const Real after = block_max > max ? block_max : max;
    const Real factor = rescale(max, after);
    max = after;
    sum *= factor;
    return factor;
  }

  // A sink: a logit (natural units) that joins the sum and has no value row. Returns the factor for the output.
  FLASH_HD Real fold_sink(Real logit) {
    const Real score = logit * kLog2e;
    const Real factor = fold_max(score);
    if (score != -Real(INFINITY)) sum += exp2(score - max);
    return factor;
  }

  FLASH_HD Real normaliser() const { return sum == Real(0) ? Real(0) : Real(1) / sum; }

  FLASH_HD Real lse() const { return sum == Real(0) ? -Real(INFINITY) : max * kLn2 + log(sum); }

  // What backward subtracts: P = 2^(score - lse2). +inf for an empty row, so that every P is 0 without a test.
  static FLASH_HD Real lse2(Real lse) { return lse == -Real(INFINITY) ? Real(INFINITY) : lse * kLog2e; }

  static FLASH_HD Real exp2(Real x) { return ::exp2(x); }
};

template <>
FLASH_HD float Softmax<float>::exp2(float x) {
#if defined(__CUDA_ARCH__)
  return exp2f(x);
#else
  return std::exp2(x);
#endif
}

// Weights of two finished partial results, given their natural-log lse: out = a * out_a + b * out_b.
template <class Real>
struct Merge {
  Real a, b, lse;
};

// Two empty parts stay empty; an empty part leaves the other exactly as it is.
template <class Real>
FLASH_HD Merge<Real> merge(Real lse_a, Real lse_b) {
  const Real empty = -Real(INFINITY);
  if (lse_b == empty) return {lse_a == empty ? Real(0) : Real(1), Real(0), lse_a};
  if (lse_a == empty) return {Real(0), Real(1), lse_b};
  const Real top = lse_a > lse_b ? lse_a : lse_b;
  const Real wa = exp(lse_a - top), wb = exp(lse_b - top), sum = wa + wb;
  return {wa / sum, wb / sum, static_cast<Real>(top + log(sum))};
}

// What x of a part with this lse adds to the merged output. An empty part is dropped, whatever it holds. One whose weight is merely too
// small for a number is not: NaN stays NaN.
template <class Real>
FLASH_HD Real weigh(Real weight, Real lse, Real x) {
  return lse == -Real(INFINITY) ? Real(0) : weight * x;
}

}  // namespace flash::problem
