// cpu/exp.h: powers of 2 and of e of vectors.
#pragma once
#include "cpu/vector.h"

namespace flash::cpu {
namespace {

// 2^y = s + s * (f * p(f)): s is a power of 2, or of its eighth root where a register is a table of those, which leaves a short polynomial;
// f is the rest. Adding kMagic to y rounds it into the low bits, where kShift is the distance to an exponent's. p is minimax for f of either
// sign: 2^0 is exactly 1, and an error of 1e-7 would show in gradients.
template <class Real>
struct Exp2;
#if defined(__AVX2__)
template <>
struct Exp2<float> {
  static constexpr float kMagic = 0x1.8p20f + 127, kLowest = -125, kHighest = 127.4f;
  static constexpr int kShift = 20;
  static constexpr float kTerms[] = {0x1.c6a002p-5f, 0x1.ec0c32p-3f, 0x1.62e432p-1f};
  static constexpr int kMantissas[] = {0x000000, 0x0b95c2, 0x1837f0, 0x25fed7, 0x3504f3, 0x45672a, 0x5744fd, 0x6ac0c7};
};
#else
template <>
struct Exp2<float> {
  static constexpr float kMagic = 0x1.8p23f + 127, kLowest = -125, kHighest = 127.4f;
  static constexpr int kShift = 23;
  static constexpr float kTerms[] = {0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f,
                                     0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e430p-1f};
};
#endif
template <>
struct Exp2<double> {
  static constexpr double kMagic = 0x1.8p52 + 1023, kLowest = -1021, kHighest = 1023.4;
  static constexpr int kShift = 52;
  // Taylor series: the next term is below 2^-57.
  static constexpr double kTerms[] = {
      0x1.816193166d0f9p-40, 0x1.c3bd650fc2986p-36, 0x1.e8cac7351bb25p-32, 0x1.e4cf5158b8ecap-28, 0x1.b5253d395e7c4p-24,
      0x1.62c0223a5c824p-20, 0x1.ffcbfc588b0c7p-17, 0x1.430912f86c787p-13, 0x1.5d87fe78a6731p-10, 0x1.3b2ab6fba4e77p-7,
      0x1.c6b08d704a0c0p-5,  0x1.ebfbdff82c58fp-3,  0x1.62e42fefa39efp-1};
};

// s from the low bits of y + kMagic.
template <class Real>
FLASH_INLINE Vector<Real> power(Vector<Real> sum) {
  using Int = typename Types<Real>::Int;
  const Int bits = (Int)sum, shifted = bits << Exp2<Real>::kShift;
#if defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) {  // the three lowest bits choose a root, and must not be added to its mantissa
    Int roots;
    for (int i = 0; i < kWidth<Real>; ++i) roots[i] = Exp2<Real>::kMantissas[i & 7] - ((i & 7) << Exp2<Real>::kShift);
#if defined(__AVX512F__)
    roots = (Int)_mm512_permutexvar_epi32((__m512i)bits, (__m512i)roots);
#else
    roots = (Int)_mm256_permutevar8x32_epi32((__m256i)roots, (__m256i)bits);
#endif
    return (Vector<Real>)(shifted + roots);
  }
#endif
  return (Vector<Real>)shifted;
}

// x = 2^(x * c), c > 0, for x * c <= kHighest. 0 where it rounds to less than kLowest: products of subnormal numbers take a hundred cycles.
// NaN where x is. Step by step over N vectors: the steps of one depend on each other. rest, if any: the factor is c + rest.
template <class Real, int N, class... Rest>
FLASH_INLINE void exp2(Vector<Real> (&x)[N], Vector<Real> c, Rest... rest) {
  using E = Exp2<Real>;
  constexpr int kCount = sizeof(E::kTerms) / sizeof(Real);
  const Vector<Real> magic = set(E::kMagic);
  Vector<Real> sum[N], p[N];
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
  for (int i = 0; i < N; ++i) p[i] *= x[i];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const Vector<Real> s = power<Real>(sum[i]);
    x[i] = sum[i] < E::kMagic + E::kLowest ? Vector<Real>{} : fma(p[i], s, s);
  }
}
template <class Real>
FLASH_INLINE Vector<Real> exp2(Vector<Real> x, Vector<Real> c) {
  Vector<Real> one[1] = {x};
  exp2<Real, 1>(one, c);
  return one[0];
}

// x = e^x, any x: from 0 to 2^kHighest.
template <class Real, int N>
FLASH_INLINE void exp(Vector<Real> (&x)[N]) {
  constexpr long double kExact = 1.4426950408889634073599246810019L;
  constexpr Real kLog2e = static_cast<Real>(kExact), kRest = static_cast<Real>(kExact - kLog2e);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = min(set(Exp2<Real>::kHighest / kLog2e), x[i]);
  exp2<Real, N>(x, set(kLog2e), set(kRest));
}

}  // namespace
}  // namespace flash::cpu
