// ptx/copy.cuh: asynchronous copies from global to shared memory. PTX ISA, "Data Movement and Conversion: cp.async".
// The source is read for `bytes` bytes, the rest of the destination becomes zeros; with 0 bytes nothing is read.
#pragma once
#include <cstdint>

namespace flash::ptx {

// cp.async.cg: past L1, the whole 128-byte line into L2.
__device__ __forceinline__ void copy_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_16(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// cp.async.ca: the only form for 8 and 4 bytes.
__device__ __forceinline__ void copy_8(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_4(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// cp.async.commit_group
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: until at most kPending of this thread's committed groups are under way. Waits for committed copies only.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash::ptx
