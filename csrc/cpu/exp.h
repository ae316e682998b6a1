// cpu/exp.h: powers of 2 and of e of vectors.
#pragma once
#include "cpu/vector.h"

namespace flash::cpu {
namespace {

template <class Real>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float kLowest = -127, kHighest = 128,
                         kMagic = 0x1.8p23f + 127;  // adding kMagic rounds to an integer in the low bits
  static constexpr int kMantissa = 23;
  // 2^f - 1 over f for |f| <= 1/2, minimax with the constant of 2^f pinned to 1: 2^0 is exactly 1. One degree less would be off by
  // 1.1e-7, which gradients show.
  static constexpr float kTerms[] = {0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f,
                                     0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e430p-1f};
};
template <>
struct Exp2<double> {
  static constexpr double kLowest = -1023, kHighest = 1024, kMagic = 0x1.8p52 + 1023;
  static constexpr int kMantissa = 52;
  // Taylor series: the next term is below 2^-57.
  static constexpr double kTerms[] = {
      0x1.816193166d0f9p-40, 0x1.c3bd650fc2986p-36, 0x1.e8cac7351bb25p-32, 0x1.e4cf5158b8ecap-28, 0x1.b5253d395e7c4p-24,
      0x1.62c0223a5c824p-20, 0x1.ffcbfc588b0c7p-17, 0x1.430912f86c787p-13, 0x1.5d87fe78a6731p-10, 0x1.3b2ab6fba4e77p-7,
      0x1.c6b08d704a0c0p-5,  0x1.ebfbdff82c58fp-3,  0x1.62e42fefa39efp-1};
};

#if defined(__AVX512F__)
// The same with what AVX-512 has for it. 2^f - 1 over f for f in [0, 1). rest, if any: then the fraction is exact, too.
template <int N, class... Rest>
FLASH_INLINE void exp2_by_scale(Vector<float> (&x)[N], Vector<float> c, Rest... rest) {
  constexpr float kTerms[] = {
      0x1.c54186p-13f, 0x1.46d646p-10f, 0x1.3d0b92p-7f, 0x1.c68912p-5f, 0x1.ebfd58p-3f, 0x1.62e42cp-1f, 1};
  Vector<float> y[N], p[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) y[i] = rounded(x[i] * c);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    Vector<float> fraction = _mm512_reduce_ps(y[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    ((fraction += fma(x[i], rest, _mm512_fmsub_ps(x[i], c, y[i]))), ...);
    x[i] = fraction;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(set(kTerms[0]), x[i], set(kTerms[1]));
#pragma GCC unroll 8
  for (int k = 2; k < 7; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set(kTerms[k]));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {  // products of subnormal numbers take a hundred cycles
    const __mmask16 normal = _mm512_cmp_ps_mask(y[i], set(-126.0f), _CMP_NLT_UQ);
    x[i] = _mm512_maskz_scalef_ps(normal, p[i], y[i]);
  }
}
#elif defined(__AVX2__)
// The same with the powers of the eighth root of 2 in a table, which leaves a short polynomial: 2^f - 1 over f for |f| <= 1/16, minimax,
// 2.5e-8 off.
template <int N, class... Rest>
FLASH_INLINE void exp2_by_table(Vector<float> (&x)[N], Vector<float> c, Vector<float> lowest, Rest... rest) {
  using Int = Types<float>::Int;
  constexpr float kTerms[] = {0x1.c6a002p-5f, 0x1.ec0c32p-3f, 0x1.62e432p-1f};
  constexpr int kMantissas[] = {0x000000, 0x0b95c2, 0x1837f0, 0x25fed7, 0x3504f3, 0x45672a, 0x5744fd, 0x6ac0c7};
  constexpr float kMagic = 0x1.8p20f + 127;  // adding kMagic rounds to eighths in the low bits
  Int roots;
  for (int i = 0; i < 8; ++i) roots[i] = kMantissas[i] - (i << 20);
  const Vector<float> magic = set(kMagic);
  Vector<float> sum[N], p[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = max(lowest, x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) sum[i] = fma(x[i], c, magic);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = magic - sum[i];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    Vector<float> fraction = fma(x[i], c, p[i]);
    ((fraction = fma(x[i], rest, fraction)), ...);
    x[i] = fraction;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(set(kTerms[0]), x[i], set(kTerms[1]));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set(kTerms[2]));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] *= x[i];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {  // eighths choose the root, the rest becomes the exponent
    const Int bits = (Int)sum[i];
    sum[i] = (Vector<float>)((Int)_mm256_permutevar8x32_epi32((__m256i)roots, (__m256i)bits) + (bits << 20));
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = fma(p[i], sum[i], sum[i]);
}
#endif

// x = 2^(x * c), c > 0. 0 where x * c < -127 (the subnormal numbers too), NaN where x is. lowest: lowest_of(c). x * c <= 128.
// Step by step over N vectors: the steps of one depend on each other. rest, if any: the factor is c + rest.
template <class Real, int N, class... Rest>
FLASH_INLINE void exp2(Vector<Real> (&x)[N], Vector<Real> c, Vector<Real> lowest, Rest... rest) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) return exp2_by_scale(x, c, rest...);
#elif defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) return exp2_by_table(x, c, lowest, rest...);
#endif
  using E = Exp2<Real>;
  constexpr int kCount = sizeof(E::kTerms) / sizeof(Real);
  const Vector<Real> magic = set(E::kMagic);
  Vector<Real> sum[N], p[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = max(lowest, x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) sum[i] = fma(x[i], c, magic);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = magic - sum[i];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    Vector<Real> fraction = fma(x[i], c, p[i]);
    ((fraction = fma(x[i], rest, fraction)), ...);
    x[i] = fraction;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(set(E::kTerms[0]), x[i], set(E::kTerms[1]));
#pragma GCC unroll 16
  for (int k = 2; k < kCount; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set(E::kTerms[k]));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set(Real(1)));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = p[i] * (Vector<Real>)((typename Types<Real>::Int)sum[i] << E::kMantissa);
}
template <class Real>
FLASH_INLINE Vector<Real> exp2(Vector<Real> x, Vector<Real> c, Vector<Real> lowest) {
  Vector<Real> one[1] = {x};
  exp2<Real, 1>(one, c, lowest);
  return one[0];
}
template <class Real>
inline Real lowest_of(Real c) {
  return Exp2<Real>::kLowest / c;
}

// x = e^x, any x: from 0 to infinity.
template <class Real, int N>
FLASH_INLINE void exp(Vector<Real> (&x)[N]) {
  constexpr long double kExact = 1.4426950408889634073599246810019L;
  constexpr Real kLog2e = static_cast<Real>(kExact), kRest = static_cast<Real>(kExact - kLog2e);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = min(set(Exp2<Real>::kHighest / kLog2e), x[i]);
  exp2<Real, N>(x, set(kLog2e), set(lowest_of(kLog2e)), set(kRest));
}

}  // namespace
}  // namespace flash::cpu
