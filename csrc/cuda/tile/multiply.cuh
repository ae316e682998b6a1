// tile/multiply.cuh: operands from shared memory to registers, products of register tiles, 16-bit elements.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/layout.cuh"

namespace flash::tile {

template <int kI, int kJ>
__device__ __forceinline__ void clear(float (&r)[kI][kJ][4]) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j) r[i][j][0] = r[i][j][1] = r[i][j][2] = r[i][j][3] = 0;
}

// kI blocks of 16 rows of one k16 step. `address`: this lane's, already moved to the step's columns.
template <class Layout, int kI>
__device__ __forceinline__ void load_rows(uint32_t (&r)[kI][4], uint32_t address) {
#pragma unroll
  for (int i = 0; i < kI; ++i) ptx::load_matrices(r[i], address + i * 16 * Layout::kRowBytes);
}

// rD [16 kI, 16 of its columns from 16 j] += rA [16 kI, 16] rB [16, 16].
template <class T, int kI, int kJ>
__device__ __forceinline__ void multiply(float (&rD)[kI][kJ][4], int j, const uint32_t (&rA)[kI][4], const uint32_t (&rB)[4]) {
#pragma unroll
  for (int i = 0; i < kI; ++i) {
    ptx::mma(rD[i][2 * j], rA[i], rB[0], rB[1], T());
    ptx::mma(rD[i][2 * j + 1], rA[i], rB[2], rB[3], T());
  }
}

// The same with step k of a packed accumulator as rA.
template <class T, int kI, int kJ, int kK>
__device__ __forceinline__ void multiply(float (&rD)[kI][kJ][4], int j, const uint32_t (&rA)[kI][kK][4], int k,
                                         const uint32_t (&rB)[4]) {
#pragma unroll
  for (int i = 0; i < kI; ++i) {
    ptx::mma(rD[i][2 * j], rA[i][k], rB[0], rB[1], T());
    ptx::mma(rD[i][2 * j + 1], rA[i][k], rB[2], rB[3], T());
  }
}

// rD [16 kI lines, 8 kJ columns] += lines columns^T over kSteps k16 steps; lane addresses of both, the columns from `first` on.
template <class T, class Layout, int kSteps, int kI, int kJ>
__device__ __forceinline__ void multiply_lines(float (&rD)[kI][kJ][4], uint32_t lines, uint32_t columns, int first = 0) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t rLines[kI][4], rColumns[4];
    load_rows<Layout>(rLines, Layout::columns(lines, step));
#pragma unroll
    for (int j = 0; j < kJ / 2; ++j) {
      ptx::load_matrices(rColumns, Layout::columns(columns, step) + (first + j * 16) * Layout::kRowBytes);
      multiply<T>(rD, j, rLines, rColumns);
    }
  }
}

// An accumulator [16 kI, 8 kJ] as the A operand of the next product, rounded to T.
template <class T, int kI, int kJ>
__device__ __forceinline__ void pack(uint32_t (&rA)[kI][kJ / 2][4], const float (&r)[kI][kJ][4]) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int k = 0; k < kJ / 2; ++k) {
      rA[i][k][0] = ptx::pack(r[i][2 * k][0], r[i][2 * k][1], T());
      rA[i][k][1] = ptx::pack(r[i][2 * k][2], r[i][2 * k][3], T());
      rA[i][k][2] = ptx::pack(r[i][2 * k + 1][0], r[i][2 * k + 1][1], T());
      rA[i][k][3] = ptx::pack(r[i][2 * k + 1][2], r[i][2 * k + 1][3], T());
    }
}

}  // namespace flash::tile
