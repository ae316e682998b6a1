// cuda/common/attributes.cuh: raises a kernel's limit of dynamic shared memory, once per kernel and device.
// The call is host-only and allowed while a graph is captured, so a cold first call can be captured too.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flash::cuda {

template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit per device; devices past 63 ask every time
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace flash::cuda
