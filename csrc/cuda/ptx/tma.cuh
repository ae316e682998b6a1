// ptx/tma.cuh: the tensor memory accelerator: boxes of a tensor between global and shared memory, by one thread. PTX ISA, "Data
// Movement and Conversion: Tensor copy", cp.async.bulk.tensor. Elements outside the tensor read as zeros and are not written. sm_90.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace flash::ptx {

// Coordinates of a box in a 5-D tensor map, innermost dimension first.
struct Box {
  int c0, c1, c2, c3, c4;
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor global -> shared; the bytes count towards `barrier`.
__device__ __forceinline__ void load_box(uint32_t destination, const CUtensorMap* map, uint32_t barrier, Box box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(box.c4)
      : "memory");
}

// cp.async.bulk.prefetch.tensor: a box to L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, Box box) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1,%2,%3,%4,%5}];" ::"l"(map), "r"(box.c0), "r"(box.c1),
               "r"(box.c2), "r"(box.c3), "r"(box.c4)
               : "memory");
}

// cp.async.bulk global -> shared: contiguous bytes, a multiple of 16, both ends 16-byte aligned; they count towards `barrier`.
__device__ __forceinline__ void load_bytes(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// cp.async.bulk shared -> global, in this thread's current bulk group.
__device__ __forceinline__ void store_bytes(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// cp.async.bulk.tensor shared -> global, in this thread's current bulk group.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t source, Box box) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(source),
               "r"(box.c0), "r"(box.c1), "r"(box.c2), "r"(box.c3), "r"(box.c4)
               : "memory");
}

// cp.async.bulk.commit_group
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: until at most kPending groups of this thread still read their source.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: until at most kPending groups of this thread are under way at all.
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// fence.proxy.async: what this thread wrote to shared memory becomes visible to asynchronous copies.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flash::ptx
