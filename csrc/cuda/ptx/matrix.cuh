// ptx/matrix.cuh: 8x8 matrices of 16-bit elements between shared memory and registers. PTX ISA, "Warp Level Matrix Load
// Instruction: ldmatrix" and "movmatrix". Lane l gives the address of row l % 8 of matrix l / 8; matrix m arrives in r[m].
#pragma once
#include <cstdint>

namespace flash::ptx {

// ldmatrix.x4: lane l holds elements (l / 4, 2 (l % 4) + {0, 1}) of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ldmatrix.x4.trans: lane l holds elements (2 (l % 4) + {0, 1}, l / 4) of each matrix.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// movmatrix.trans: the transpose of a matrix that the lanes hold as load_matrices leaves it.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t r) {
  uint32_t t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r));
  return t;
}

}  // namespace flash::ptx
