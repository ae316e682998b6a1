// ptx/memory.cuh: shared-memory accesses by 32-bit address, and reductions into global memory. PTX ISA, "ld", "st", "red".
#pragma once
#include <cstdint>

namespace flash::ptx {

// The 32-bit address of a pointer into shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// ld.shared.v2.f32
__device__ __forceinline__ float2 load_shared_8(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// ld.volatile.shared.b32: what another thread of the block may have changed.
__device__ __forceinline__ int load_shared_volatile(uint32_t address) {
  int value;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// ld.acquire.gpu.global.u32
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// st.release.gpu.global.u32
__device__ __forceinline__ void store_release(unsigned* p, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// red.release.gpu.global.add.u32
__device__ __forceinline__ void add_release(unsigned* p, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// add.cc.u32, addc.u32: p + bytes without a wide product, of which a single one delays wgmma by 15 cycles.
__device__ __forceinline__ float* advance(float* p, uint32_t bytes) {
  uint64_t sum;
  asm("{\n.reg .u32 low, high;\nmov.b64 {low, high}, %1;\nadd.cc.u32 low, low, %2;\naddc.u32 high, high, 0;\nmov.b64 %0, {low, "
      "high};\n}"
      : "=l"(sum)
      : "l"(p), "r"(bytes));
  return reinterpret_cast<float*>(sum);
}

// red.global.add.f32
__device__ __forceinline__ void reduce_add(float* p, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

// red.global.add.v4.f32 (sm_90): 16-byte aligned.
__device__ __forceinline__ void reduce_add_4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace flash::ptx
