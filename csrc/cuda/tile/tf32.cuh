// tile/tf32.cuh: fp32 operands of tensor cores as two TF32 terms, x = high + low: a b = high high + high low + low high keeps fp32's
// accuracy. PTX ISA, "Matrix multiply-accumulate operation using mma instruction": of a TF32 operand the low 13 bits are not read.
#pragma once
#include <cstdint>

#include "cuda/ptx/math.cuh"

namespace flash::tile {

struct Terms {
  uint32_t high[4], low[4];
};

// A register of four floats, split. high is rounded, so that low has either sign and its own truncation does not lean to one side.
// Three instructions an element; cvt.rna.tf32 would be three for each term. kLow: false where high alone is multiplied.
template <bool kLow = true>
__device__ __forceinline__ Terms split(const uint32_t (&x)[4]) {
  Terms r;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    r.high[e] = kLow ? (x[e] + 0x1000u) & 0xffffe000u : ptx::to_tf32(__uint_as_float(x[e]));
    r.low[e] = kLow ? __float_as_uint(__uint_as_float(x[e]) - __uint_as_float(r.high[e])) : 0;
  }
  return r;
}
template <bool kLow = true>
__device__ __forceinline__ Terms split(uint4 x) {
  return split<kLow>({x.x, x.y, x.z, x.w});
}

}  // namespace flash::tile
