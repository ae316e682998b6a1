// cpu/number.h: the element types of tensors as C++ types, and single elements widened to the accumulate type and back.
// Everything here has internal linkage: files that include it are compiled for different instruction sets.
#pragma once
#include <cstdint>
#include <cstring>

#include "problem/problem.h"

namespace flash::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // inf, NaN
  // The exponent moves by 112; the multiplication does it exactly, subnormal numbers included.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
}

// Round to nearest, ties to even. NaN stays NaN.
inline void narrow(double x, double* to) { *to = x; }
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    to->bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
  } else {
    to->bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}
inline void narrow(float x, Float16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520: halfway between the largest number and the next power of two
    half = 0x7c00u;
  } else if (magnitude <
             0x38800000u) {  // below 2^-14: the addition lines the 2^-24 of half's subnormal numbers up with ulp(0.5)
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

// Calls f(T{}) with the element type that `type` names.
template <class F>
inline void with_type(problem::DType type, const F& f) {
  switch (type) {
    case problem::DType::kFloat64:
      return f(double{});
    case problem::DType::kFloat32:
      return f(float{});
    case problem::DType::kBFloat16:
      return f(BFloat16{});
    default:
      return f(Float16{});
  }
}

// The same among the types that are computed in Real.
template <class Real, class F>
inline void with_real_type(problem::DType type, const F& f) {
  if constexpr (sizeof(Real) == 8) {
    f(double{});
  } else if (type == problem::DType::kFloat32) {
    f(float{});
  } else if (type == problem::DType::kBFloat16) {
    f(BFloat16{});
  } else {
    f(Float16{});
  }
}

}  // namespace
}  // namespace flash::cpu
