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

}  // namespace
}  // namespace flash::cpu
