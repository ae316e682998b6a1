// ptx/wgmma.cuh: warpgroup matrix products, d [64, N] (+)= a [64, 16] b [16, N], fp32 accumulators. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma". sm_90a.
// Lane l of warp w of the warpgroup holds d[4 j + e] = (16 w + l / 4 + 8 (e / 2), 8 j + 2 (l % 4) + e % 2).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash::ptx {

// wgmma.fence: registers written before are seen by the products that follow.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: ends a batch of products.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: until at most kPending batches are under way.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Holds what is written before in registers here: nothing moves past it.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// 0, but ptxas does not know.
__device__ __forceinline__ uint32_t opaque_zero() {
  uint32_t zero;
  asm volatile("mov.b32 %0, 0;" : "=r"(zero));
  return zero;
}

// Shared-memory matrix descriptor with 128-byte swizzle; distances in bytes. K-major: `leading` is not used, `stride` is from one
// group of 8 rows to the next. N-major: `leading` is from one panel of 64 columns to the next, `stride` as before.
__device__ __forceinline__ uint64_t describe_matrix(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t{1} << 62) | (uint64_t{stride >> 4} << 32) | (uint64_t{leading >> 4} << 16) |
         uint64_t{(address & 0x3FFFF) >> 4};
}

// The same without swizzle, K-major: groups of 8 rows x 16 bytes, `leading` from one to the next along K, `stride` along the rows.
__device__ __forceinline__ uint64_t describe_groups(uint32_t address, uint32_t leading, uint32_t stride) {
  return describe_matrix(address, leading, stride) & ~(uint64_t{3} << 62);
}

// clang-format off
// Operand lists of asm statements, spelled by the preprocessor and undefined at the end of this file: the names "%0,%1,..." of the
// accumulators, and the accumulators themselves.
#define FLASH_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FLASH_NAMES_32 FLASH_TEN() FLASH_TEN(1) FLASH_TEN(2) "%30,%31"
#define FLASH_NAMES_64 FLASH_TEN() FLASH_TEN(1) FLASH_TEN(2) FLASH_TEN(3) FLASH_TEN(4) FLASH_TEN(5) "%60,%61,%62,%63"
#define FLASH_NAMES_96 \
  FLASH_TEN()          \
  FLASH_TEN(1)         \
  FLASH_TEN(2) FLASH_TEN(3) FLASH_TEN(4) FLASH_TEN(5) FLASH_TEN(6) FLASH_TEN(7) FLASH_TEN(8) "%90,%91,%92,%93,%94,%95"
#define FLASH_NAMES_128                                                                                    \
  FLASH_TEN()                                                                                              \
  FLASH_TEN(1)                                                                                             \
  FLASH_TEN(2)                                                                                             \
  FLASH_TEN(3) FLASH_TEN(4) FLASH_TEN(5) FLASH_TEN(6) FLASH_TEN(7) FLASH_TEN(8) FLASH_TEN(9) FLASH_TEN(10) \
      FLASH_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127"
#define FLASH_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH_D32(i) FLASH_D8(i), FLASH_D8(i + 8), FLASH_D8(i + 16), FLASH_D8(i + 24)
#define FLASH_ACCUMULATORS_32 FLASH_D32(0)
#define FLASH_ACCUMULATORS_64 FLASH_D32(0), FLASH_D32(32)
#define FLASH_ACCUMULATORS_96 FLASH_D32(0), FLASH_D32(32), FLASH_D32(64)
#define FLASH_ACCUMULATORS_128 FLASH_D32(0), FLASH_D32(32), FLASH_D32(64), FLASH_D32(96)

// r: accumulators per thread, N = 2 r; a, b, p, ...: numbers of the operands behind them.
#define FLASH_BOTH_SHARED(type, t, n, r, a_, b_, p_)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" FLASH_NAMES_##r "}, %" #a_ ", %" #b_ ", p, 1, 1, " t ", " t ";\n}"                                                \
               : FLASH_ACCUMULATORS_##r                                                                                       \
               : "l"(a), "l"(b), "n"(kAccumulate))
#define FLASH_A_IN_REGISTERS(type, n, r, a0_, a1_, a2_, a3_, b_, p_)                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" FLASH_NAMES_##r "}, {%" #a0_ ",%" #a1_ ",%" #a2_ ",%" #a3_ "}, %" #b_ ", p, 1, 1, 1;\n}"                  \
               : FLASH_ACCUMULATORS_##r                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate))

// clang-format on

// Both operands in shared memory, K-major. kAccumulate 0: d = a b.
template <class T, int kAccumulate, int kRegisters>
__device__ __forceinline__ void multiply_async(float (&d)[kRegisters], uint64_t a, uint64_t b) {
  static_assert(kRegisters == 32 || kRegisters == 64, "spell the operands of this width out below");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kRegisters == 32) FLASH_BOTH_SHARED("bf16", "0", 64, 32, 32, 33, 34);
    if constexpr (kRegisters == 64) FLASH_BOTH_SHARED("bf16", "0", 128, 64, 64, 65, 66);
  } else {
    if constexpr (kRegisters == 32) FLASH_BOTH_SHARED("f16", "0", 64, 32, 32, 33, 34);
    if constexpr (kRegisters == 64) FLASH_BOTH_SHARED("f16", "0", 128, 64, 64, 65, 66);
  }
}

// Both operands in shared memory, a M-major and b N-major.
template <class T, int kAccumulate>
__device__ __forceinline__ void multiply_transposed_async(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    FLASH_BOTH_SHARED("bf16", "1", 64, 32, 32, 33, 34);
  } else {
    FLASH_BOTH_SHARED("f16", "1", 64, 32, 32, 33, 34);
  }
}

// a in registers (the layout of mma's A operand per warp), b in shared memory, N-major.
template <class T, int kAccumulate, int kRegisters>
__device__ __forceinline__ void multiply_async(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kRegisters == 32 || kRegisters == 64 || kRegisters == 96 || kRegisters == 128, "spell this width out below");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kRegisters == 32) FLASH_A_IN_REGISTERS("bf16", 64, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (kRegisters == 64) FLASH_A_IN_REGISTERS("bf16", 128, 64, 64, 65, 66, 67, 68, 69);
    if constexpr (kRegisters == 96) FLASH_A_IN_REGISTERS("bf16", 192, 96, 96, 97, 98, 99, 100, 101);
    if constexpr (kRegisters == 128) FLASH_A_IN_REGISTERS("bf16", 256, 128, 128, 129, 130, 131, 132, 133);
  } else {
    if constexpr (kRegisters == 32) FLASH_A_IN_REGISTERS("f16", 64, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (kRegisters == 64) FLASH_A_IN_REGISTERS("f16", 128, 64, 64, 65, 66, 67, 68, 69);
    if constexpr (kRegisters == 96) FLASH_A_IN_REGISTERS("f16", 192, 96, 96, 97, 98, 99, 100, 101);
    if constexpr (kRegisters == 128) FLASH_A_IN_REGISTERS("f16", 256, 128, 128, 129, 130, 131, 132, 133);
  }
}

#undef FLASH_TEN
#undef FLASH_NAMES_32
#undef FLASH_NAMES_64
#undef FLASH_NAMES_96
#undef FLASH_NAMES_128
#undef FLASH_D8
#undef FLASH_D32
#undef FLASH_ACCUMULATORS_32
#undef FLASH_ACCUMULATORS_64
#undef FLASH_ACCUMULATORS_96
#undef FLASH_ACCUMULATORS_128
#undef FLASH_BOTH_SHARED
#undef FLASH_A_IN_REGISTERS

}  // namespace flash::ptx
