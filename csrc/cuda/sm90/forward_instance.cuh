// sm90/forward_instance.cuh: the body of launch_forward, included by the instances alone.
#pragma once
#include "cuda/common/attributes.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/forward_launch.cuh"

namespace flash::sm90 {

template <class T, int kVariant, bool kCapped>
cudaError_t launch_forward(const ForwardArguments& arguments, unsigned blocks, cudaStream_t stream) {
  using Config = ForwardConfig<T, kVariant, kCapped>;
  constexpr auto kKernel = forward_kernel<Config>;
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  kKernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace flash::sm90
