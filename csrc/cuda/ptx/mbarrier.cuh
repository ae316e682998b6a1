// ptx/mbarrier.cuh: barriers in shared memory that count arrivals and bytes. PTX ISA, "Parallel Synchronization and Communication:
// mbarrier". A phase ends when all arrivals and all announced bytes are in; parity is the phase's number modulo 2. sm_90.
#pragma once
#include <cstdint>

namespace flash::ptx {

// mbarrier.init: `arrivals` per phase.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives and announces bytes that copies will bring.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity in a loop: until the phase of this parity has ended.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

}  // namespace flash::ptx
