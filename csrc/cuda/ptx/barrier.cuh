// ptx/barrier.cuh: named barriers. PTX ISA, "Parallel Synchronization and Communication Instructions: bar".
#pragma once

namespace flash::ptx {

// bar.sync: barrier 1..15 (0 is __syncthreads) for kThreads threads, whole warps.
template <int kThreads>
__device__ __forceinline__ void synchronise(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace flash::ptx
