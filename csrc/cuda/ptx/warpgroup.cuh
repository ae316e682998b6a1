// ptx/warpgroup.cuh: what warpgroups share out: registers (setmaxnreg) and named barriers. PTX ISA, "Miscellaneous Instructions:
// setmaxnreg", "bar". sm_90.
#pragma once
#include <cstdint>

namespace flash::ptx {

// setmaxnreg: the sum over all warps must fit what the launch reserved, else the block hangs.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync, bar.arrive: named barrier `id` of `threads` threads, those that wait and those that only arrive.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A value that all lanes of a warp hold, in a uniform register: REDUX writes one, and what is computed from it stays uniform. For loop
// bounds above all: ptxas keeps what a loop of unproven bounds carries in vector registers, and matrix descriptors made of those cost
// two R2UR a product. redux.sync.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return static_cast<T>(__reduce_or_sync(~0u, static_cast<unsigned>(value)));
}

// stmatrix.x4: four 8x8 matrices of 16-bit elements to shared memory, laid out as ldmatrix reads them (ptx/matrix.cuh).
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

}  // namespace flash::ptx
