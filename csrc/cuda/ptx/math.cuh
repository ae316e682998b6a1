// ptx/math.cuh: single-instruction arithmetic. PTX ISA, "Floating Point Instructions" and "cvt".
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash::ptx {

// ex2.approx.ftz.f32: 2^x; -inf gives 0, NaN stays NaN.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32: log2(x) to about 2^-22.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1 / x.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// min.NaN.f32: the smaller, NaN if either is.
__device__ __forceinline__ float min_nan(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

// cvt.rn.bf16x2.f32, cvt.rn.f16x2.f32: two floats as one register, `low` in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// prmt.b32: byte i of the result is byte number (kSelector >> 4 i) & 7 of `high`:`low`, or with bit 3 its sign in all bits.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "n"(kSelector));
  return r;
}

// mul.ftz.f32: numbers below 2^-126 count as 0.
__device__ __forceinline__ float multiply_flushed(float a, float b) {
  float r;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// mad.lo.u32
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// cvt.rna.tf32.f32: nearest TF32 (10 bits of mantissa), as the bits of a float.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

}  // namespace flash::ptx
