// sm80/backward_tf32_launch.cuh: launches of the fp32 tensor-core backward kernels. An instance file instantiates those of one tile.
#pragma once
#include "cuda/common/attributes.cuh"
#include "cuda/sm80/backward_grid.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/sm80/backward_tf32.cuh"

namespace flash::sm80 {

template <class Config>
cudaError_t launch_tf32(BackwardCall call, int64_t walked_bytes, cudaStream_t stream) {
  constexpr auto kKernel = backward_tf32_kernel<Config>;
  const unsigned blocks = set_grid(call, !Config::kOfKeys, Config::kLines, walked_bytes);
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  kKernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

template <int kVariant>
cudaError_t launch_tf32_keys(BackwardCall call, cudaStream_t stream) {
  using Config = Tf32Keys<cuda::kBackwardTiles[kVariant]>;
  const problem::Problem& p = call.problem;
  return launch_tf32<Config>(call, p.rows * call.group * Config::kDim * (4 + 4 + 4), stream);  // Q, dO, dQ
}

template <int kVariant>
cudaError_t launch_tf32_rows(BackwardCall call, cudaStream_t stream) {
  using Config = Tf32Rows<cuda::kRowGradientTiles[kVariant]>;
  return launch_tf32<Config>(call, call.problem.keys * Config::kDim * (4 + 4), stream);  // K, V
}

}  // namespace flash::sm80
