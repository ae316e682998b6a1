// sm80/backward_launch.cuh: launches of the tensor-core backward kernels. An instance file instantiates those of one tile.
#pragma once
#include "cuda/common/attributes.cuh"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward_grid.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/sm80/backward_rows.cuh"

namespace flash::sm80 {

template <class T, int kVariant>
cudaError_t launch_keys(BackwardCall call, cudaStream_t stream) {
  using Config = KeysConfig<T, cuda::kBackwardTiles[kVariant]>;
  constexpr auto kKernel = backward_keys_kernel<Config>;
  const problem::Problem& p = call.problem;
  const int64_t element = call.scratch.dquery != nullptr ? 2 + 2 + 4 : 2 + 2;  // Q, dO, dQ
  const unsigned blocks = set_grid(call, false, Config::kKeys, p.rows * call.group * Config::kHeadDim * element);
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  kKernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

template <class T, int kVariant>
cudaError_t launch_rows(BackwardCall call, cudaStream_t stream) {
  using Config = RowsConfig<T, cuda::kRowGradientTiles[kVariant]>;
  constexpr auto kKernel = backward_rows_kernel<Config>;
  const unsigned blocks = set_grid(call, true, Config::kRows, call.problem.keys * Config::kHeadDim * (2 + 2));  // K, V
  if (const cudaError_t error = cuda::allow_shared_memory<kKernel>(Config::kSharedBytes); error != cudaSuccess) return error;
  kKernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace flash::sm80
