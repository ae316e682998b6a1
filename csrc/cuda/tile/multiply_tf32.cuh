// tile/multiply_tf32.cuh: products of fp32 tiles in shared memory, as TF32 terms. kThree: at fp32's accuracy; else high terms alone.
// Tensor cores truncate when they add in fp32. So products of high terms, and those of a high and a low one, are kept apart in a
// product of lines; sums of rows come from fresh accumulators, added by FADD.
// Products of one accumulator lie far apart in the order below: each waits 26 cycles for the one before, four of them take 24.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/tf32.cuh"

namespace flash::tile {

// rLarge, rSmall [16 kI lines, 8 kJ columns] += lines columns^T over the k8 steps [first, first + kSteps).
// Lane addresses for ldmatrix; block_bytes: from one block of 16 lines to the next.
template <class Layout, bool kThree, int kSteps, int kI, int kJ>
__device__ __forceinline__ void multiply_lines(float (&rLarge)[kI][kJ][4], float (&rSmall)[kI][kJ][4], uint32_t sLines,
                                               int block_bytes, uint32_t sColumns, int first = 0) {
#pragma unroll 4
  for (int n = 0; n < kSteps; ++n) {
    const int step = first + n;
    Terms rLine[kI];
#pragma unroll
    for (int i = 0; i < kI; ++i) {
      uint32_t x[4];
      ptx::load_matrices(x, Layout::columns(sLines, step) + i * block_bytes);
      rLine[i] = split<kThree>(x);
    }
#pragma unroll
    for (int j = 0; j < kJ / 2; ++j) {
      uint32_t x[4];
      ptx::load_matrices(x, Layout::columns(sColumns, step) + j * 16 * Layout::kRowBytes);
      const Terms rColumn = split<kThree>(x);
      const auto multiply = [&](float (&r)[kI][kJ][4], const uint32_t (Terms::*line)[4], const uint32_t (&column)[4]) {
#pragma unroll
        for (int i = 0; i < kI; ++i) {
          ptx::mma_tf32(r[i][2 * j], rLine[i].*line, column[0], column[1]);
          ptx::mma_tf32(r[i][2 * j + 1], rLine[i].*line, column[2], column[3]);
        }
      };
      if constexpr (kThree) multiply(rSmall, &Terms::low, rColumn.high);
      multiply(rLarge, &Terms::high, rColumn.high);
      if constexpr (kThree) multiply(rSmall, &Terms::high, rColumn.low);
    }
  }
}

template <int kI, int kJ>
__device__ __forceinline__ void add(float (&r)[kI][kJ][4], const float (&rMore)[kI][kJ][4]) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) r[i][j][e] += rMore[i][j][e];
}

// r [16 kI, 32 columns] += a [16 kI, 8] times this lane's two rows of [8, 32] at sRow. A permutation saves the transpose: column g of
// n8 tile q of the product is 4 g + q, so that one 16-byte read of a row feeds four products.
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

// rSum [16 kI, 8 kN columns] += a [16 kI, 8 kSteps] times rows of [8 kSteps, 8 kN] at sRows. find(k, i): block i of step k of a.
// kUnroll: of steps; where sums fill the registers, ptxas orders many steps into chains of dependent products.
template <class Layout, bool kThree, int kSteps, int kUnroll, int kI, int kN, class Find>
__device__ __forceinline__ void accumulate_rows(float (&rSum)[kI][kN][4], uint32_t sRows, Find find) {
#pragma unroll
  for (int d = 0; d < kN / 4; ++d) {
    float rFresh[kI][4][4];
    clear(rFresh);
#pragma unroll kUnroll
    for (int k = 0; k < kSteps; ++k) {
      Terms rLine[kI];
#pragma unroll
      for (int i = 0; i < kI; ++i) rLine[i] = split<kThree>(find(k, i));
      multiply_rows<Layout, kThree>(rFresh, rLine, sRows + k * 8 * Layout::kRowBytes + d * 128);
    }
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) rSum[i][d * 4 + q][e] += rFresh[i][q][e];
  }
}

// An accumulator's columns [8 k, 8 k + 8) as an A operand: its k = t and t + 4 are columns 2t and 2t + 1.
__device__ __forceinline__ uint4 operand(const float (&r)[4]) {
  return {__float_as_uint(r[0]), __float_as_uint(r[2]), __float_as_uint(r[1]), __float_as_uint(r[3])};
}

}  // namespace flash::tile
