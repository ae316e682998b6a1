// cpu/score.h: the exponentials, forward and backward.
#pragma once
#include "cpu/modifiers.h"

namespace flash::cpu {
namespace {

constexpr int kChains = kRegisters == 32 ? 8 : 4;  // exponentials at a time

// Scores become probabilities relative to the new maximum `after`; sum takes them in; factor is what earlier results shrink by.
// Returns whether some lane's maximum moved.
template <class Real, int NV>
FLASH_STAGE bool exponentiate(Real unit, Real* tile, int64_t keys, Real* before, const Real* after, Real* sum, Real* factor) {
  const Vector<Real> none = set(-std::numeric_limits<Real>::infinity()), c = set(unit);
  bool moved = false;
  for (int v = 0; v < NV; ++v) {
    const int at = v * kWidth<Real>;
    const Vector<Real> old = load(before + at), now = load(after + at);
    const Vector<Real> top = now == none ? Vector<Real>{} : now;  // Softmax::reference
    const auto same = old == now;
    moved |= any(~same);
    const Vector<Real> shrink = same ? set(Real(1)) : exp2<Real>(old - top, c);
    store(factor + at, shrink);
    store(before + at, now);
    Vector<Real> sums[2] = {};
    by_rows<kChains>(0, keys, [&](auto count, int64_t j) FLASH_LAMBDA {
      constexpr int N = decltype(count)::value;
      Real* to = tile + j * kGroup<Real> + at;
      Vector<Real> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = load(to + i * kGroup<Real>) - top;
      exp2<Real, N>(x, c);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        store(to + i * kGroup<Real>, x[i]);
        sums[i & 1] += x[i];
      }
    });
    store(sum + at, fma(load(sum + at), shrink, sums[0] + sums[1]));
  }
  return moved;
}

// Backward. In: tile = final scores over `scale`, gradient = d loss / d P over `gradient_scale`, as delta is not. Out: tile = P after
// dropout, gradient = that of the score, times slope (softcap's, or null), 0 where masked. lse: +inf for rows that saw nothing. kPlain:
// nothing is masked, dropped, capped.
// P = exp(score - lse), not 2^(log2 units): the difference is small where P matters, and so is its rounding error. The score is rounded
// first, as lse was: where one key is all that a row sees, P is exactly 1.
template <class Real, int NV, bool kPlain>
FLASH_STAGE void differentiate(Real scale, Real gradient_scale, int64_t keys, Real* tile, Real* gradient, int64_t stride,
                               const Real* lse, const Real* delta, const Real* keep, const Real* slope) {
  const Vector<Real> masked = set(-std::numeric_limits<Real>::infinity());
  for (int v = 0; v < NV; ++v) {
    const int at = v * kWidth<Real>;
    const Vector<Real> l = load(lse + at), d = load(delta + at);
    by_rows<kChains>(0, keys, [&](auto count, int64_t j) FLASH_LAMBDA {
      constexpr int N = decltype(count)::value;
      Real *p = tile + j * stride + at, *ds = gradient + j * stride + at;
      Vector<Real> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = rounded(load(p + i * stride) * set(scale)) - l;
      exp<Real, N>(x);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        Vector<Real> dp = load(ds + i * stride), kept = x[i];
        if constexpr (kPlain) {
          store(ds + i * stride, x[i] * fma(dp, set(gradient_scale), -d));
        } else {
          const int64_t other = (j + i) * kGroup<Real> + at;
          if (keep) {
            kept *= load(keep + other);
            dp *= load(keep + other);
          }
          Vector<Real> result = x[i] * fma(dp, set(gradient_scale), -d);
          if (slope) result *= load(slope + other);
          store(ds + i * stride, load(p + i * stride) == masked ? Vector<Real>{} : result);
        }
        store(p + i * stride, kept);
      }
    });
  }
}

}  // namespace
}  // namespace flash::cpu
