// cpu/vector.h: one register of numbers. The compiler's generic vectors, as wide as the instruction set this file is compiled for;
// intrinsics only where the generic form is missing or slow. Internal linkage: every instruction set has its own copy.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "cpu/number.h"

#define FLASH_INLINE inline __attribute__((always_inline))
#define FLASH_LAMBDA __attribute__((always_inline))

namespace flash::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

// A bool mask read as a bias: 0 where True, -inf where False.
struct Bool {
  uint8_t value;
};
inline float widen(Bool x) { return x.value ? 0.0f : -std::numeric_limits<float>::infinity(); }

template <class Real>
struct Types;
template <>
struct Types<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef float Loose __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  typedef uint8_t Byte __attribute__((vector_size(kVectorBytes / 4)));
};
template <>
struct Types<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef double Loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Unsigned __attribute__((vector_size(kVectorBytes)));
  typedef uint8_t Byte __attribute__((vector_size(kVectorBytes / 8)));
};

template <class Real>
using Vector = typename Types<Real>::V;
template <class Real>
constexpr int kWidth = kVectorBytes / sizeof(Real);

template <class Real>
FLASH_INLINE Vector<Real> set(Real x) {
  return x - Vector<Real>{};
}

FLASH_INLINE Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
FLASH_INLINE Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// x, which compilers may not take into a multiply-add with what follows.
template <class V>
FLASH_INLINE V rounded(V x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

// The second argument where either is NaN.
FLASH_INLINE Vector<float> max(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
FLASH_INLINE Vector<double> max(Vector<double> a, Vector<double> b) { return a > b ? a : b; }
FLASH_INLINE Vector<float> min(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
FLASH_INLINE Vector<double> min(Vector<double> a, Vector<double> b) { return a < b ? a : b; }

template <class Mask>
FLASH_INLINE bool any(Mask mask) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  bool found = false;
  for (int i = 0; i < static_cast<int>(sizeof(Mask) / sizeof(mask[0])); ++i) found |= mask[i] != 0;
  return found;
#endif
}

// The sum of the elements, halves first.
FLASH_INLINE float sum_of(Vector<float> x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  constexpr int W = kWidth<float>;
  Types<float>::Int from;
#pragma GCC unroll 3
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < W; ++i) from[i] = i ^ half;
    x += __builtin_shuffle(x, from);
  }
  return x[0];
#endif
}
FLASH_INLINE double sum_of(Vector<double> x) {
  double sum = 0;
  for (int i = 0; i < kWidth<double>; ++i) sum += x[i];
  return sum;
}

// The halves of the 64-bit products of 32-bit lanes with b.
using Words = Types<float>::Unsigned;
FLASH_INLINE void multiply(Words a, uint32_t b, Words* low, Words* high) {
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi32(static_cast<int>(b)), even = _mm512_mul_epu32((__m512i)a, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  *low = (Words)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  *high = (Words)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(b)), even = _mm256_mul_epu32((__m256i)a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  *low = (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  *high = (Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  for (int i = 0; i < kVectorBytes / 4; ++i) {
    const uint64_t product = uint64_t{a[i]} * b;
    (*low)[i] = static_cast<uint32_t>(product);
    (*high)[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

// ---- unaligned loads, widened -------------------------------------------------------------------------------------------------
FLASH_INLINE Vector<float> load(const float* p) { return *reinterpret_cast<const Types<float>::Loose*>(p); }
FLASH_INLINE Vector<double> load(const double* p) { return *reinterpret_cast<const Types<double>::Loose*>(p); }
FLASH_INLINE Vector<float> load(const BFloat16* p) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  Types<float>::Half half;
  std::memcpy(&half, p, sizeof(half));
  return (Vector<float>)(__builtin_convertvector(half, Types<float>::Unsigned) << 16);
#endif
}
FLASH_INLINE Vector<float> load(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vector<float> x;
  for (int i = 0; i < kWidth<float>; ++i) x[i] = widen(p[i]);
  return x;
#endif
}
template <class Real>
FLASH_INLINE Vector<Real> load(const Bool* p) {
  using Int = typename Types<Real>::Int;
  Int keep;
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) {
    keep = (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else
#elif defined(__AVX2__)
  if constexpr (sizeof(Real) == 4) {
    keep = (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  } else
#endif
  {
    typename Types<Real>::Byte bytes;
    std::memcpy(&bytes, p, sizeof(bytes));
    keep = __builtin_convertvector(bytes, Int);
  }
  return keep != 0 ? Vector<Real>{} : set(-std::numeric_limits<Real>::infinity());
}
template <class Real, class T>
FLASH_INLINE Vector<Real> load(const T* p) {
  return load(p);
}

// ---- stores, rounded to nearest even ------------------------------------------------------------------------------------------
FLASH_INLINE void store(float* p, Vector<float> x) { *reinterpret_cast<Types<float>::Loose*>(p) = x; }
FLASH_INLINE void store(double* p, Vector<double> x) { *reinterpret_cast<Types<double>::Loose*>(p) = x; }
#if defined(__AVX512BF16__)
FLASH_INLINE void store(BFloat16* p, Vector<float> x) {
  const auto half = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &half, sizeof(half));
}
// Pairs of numbers rounded to bf16.
FLASH_INLINE Types<float>::Unsigned pair(Vector<float> low, Vector<float> high) {
  Types<float>::Unsigned interleave;
#pragma GCC unroll 16
  for (uint32_t i = 0; i < 16; ++i) interleave[i] = i | (i + 16) << 16;
  return (Types<float>::Unsigned)_mm512_permutexvar_epi16((__m512i)interleave, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#else
FLASH_INLINE void store(BFloat16* p, Vector<float> x) {
  using Unsigned = Types<float>::Unsigned;
  const Unsigned bits = (Unsigned)x, odd = bits >> 16 & 1u;
  const Unsigned rounded = (bits + (odd + 0x7fffu)) >> 16, quiet = bits >> 16 | 0x40u;
  const auto half = __builtin_convertvector((Unsigned)(x == x) ? rounded : quiet, Types<float>::Half);
  std::memcpy(p, &half, sizeof(half));
}
#endif
FLASH_INLINE void store(Float16* p, Vector<float> x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kWidth<float>; ++i) narrow(x[i], p + i);
#endif
}

// The first n < kWidth elements of a row that ends there; the others are 0.
template <class Real, class T>
FLASH_INLINE Vector<Real> load_part(const T* p, int n) {
  T part[kWidth<Real>] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load<Real>(part);
}
template <class Real, class T>
FLASH_INLINE void store_part(T* p, Vector<Real> x, int n) {
  T part[kWidth<Real>];
  store(part, x);
  std::memcpy(p, part, n * sizeof(T));
}

// ---- elementary functions -----------------------------------------------------------------------------------------------------
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
#endif

// x = 2^(x * c), c > 0. 0 where x * c < -127 (the subnormal numbers too), NaN where x is. lowest: lowest_of(c). x * c <= 128.
// Step by step over N vectors: the steps of one depend on each other. rest, if any: the factor is c + rest.
template <class Real, int N, class... Rest>
FLASH_INLINE void exp2(Vector<Real> (&x)[N], Vector<Real> c, Vector<Real> lowest, Rest... rest) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) return exp2_by_scale(x, c, rest...);
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
