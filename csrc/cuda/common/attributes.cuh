// cuda/common/attributes.cuh: raises a kernel's limit of dynamic shared memory, once per kernel and device.
// The call is host-only and allowed while a graph is captured, so a cold first call can be captured too.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace flash::cuda {

// allowed: a bit per device, kept by the caller for this kernel alone; devices past 63 ask every time.
cudaError_t allow_shared_memory(const void* kernel, int bytes, uint64_t& allowed);

template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static uint64_t allowed = 0;
  return allow_shared_memory(reinterpret_cast<const void*>(kKernel), bytes, allowed);
}

}  // namespace flash::cuda
