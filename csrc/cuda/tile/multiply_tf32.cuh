// tile/multiply_tf32.cuh: products of fp32 register tiles with rows in shared memory, as TF32 terms. A permutation saves the
// transpose: column g of n8 tile q of the product is 4 g + q, so that one 16-byte read of a row feeds four products.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/tf32.cuh"

namespace flash::tile {

// r [16 kI, 32 columns] += a [16 kI, 8] times this lane's two rows of [8, 32] at sRow. kThree: at fp32's accuracy.
// Products of one accumulator lie far apart: each waits 26 cycles for the one before, four of them take 24.
template <class Layout, bool kThree, int kI>
__device__ __forceinline__ void multiply_rows(float (&r)[kI][4][4], const Terms (&a)[kI], uint32_t sRow) {
  const Terms even = split<kThree>(ptx::load_shared_16(sRow)),
              odd = split<kThree>(ptx::load_shared_16(sRow + Layout::kRowBytes));
  const auto multiply = [&](const uint32_t (Terms::*line)[4], const uint32_t (Terms::*row)[4]) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) ptx::mma_tf32(r[i][q], a[i].*line, (even.*row)[q], (odd.*row)[q]);
  };
  if constexpr (kThree) {
    multiply(&Terms::low, &Terms::high);
    multiply(&Terms::high, &Terms::low);
  }
  multiply(&Terms::high, &Terms::high);
}

// An accumulator's columns [8 k, 8 k + 8) as an A operand: its k = t and t + 4 are columns 2t and 2t + 1.
__device__ __forceinline__ uint4 operand(const float (&r)[4]) {
  return {__float_as_uint(r[0]), __float_as_uint(r[2]), __float_as_uint(r[1]), __float_as_uint(r[3])};
}

}  // namespace flash::tile
