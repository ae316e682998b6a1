// tile/reduce.cuh: reductions along the lines of an accumulator. A line of a warp's tile lies in the four lanes of a quad.
#pragma once
#include "cuda/tile/layout.cuh"

namespace flash::tile {

inline constexpr unsigned kWarp = 0xffffffffu;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWarp, x, 1);
  return x + __shfl_xor_sync(kWarp, x, 2);
}

// Largest of this lane's elements of line (i, half); NaN is passed over.
template <int kI, int kJ>
__device__ __forceinline__ float line_max(const float (&r)[kI][kJ][4], int i, int half) {
  float x = -INFINITY;
#pragma unroll
  for (int j = 0; j < kJ; ++j) x = fmaxf(x, fmaxf(r[i][j][2 * half], r[i][j][2 * half + 1]));
  return x;
}

// Multiplies line (i, half).
template <int kI, int kJ>
__device__ __forceinline__ void scale_line(float (&r)[kI][kJ][4], int i, int half, float factor) {
#pragma unroll
  for (int j = 0; j < kJ; ++j) {
    r[i][j][2 * half] *= factor;
    r[i][j][2 * half + 1] *= factor;
  }
}

}  // namespace flash::tile
