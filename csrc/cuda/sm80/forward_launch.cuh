// sm80/forward_launch.cuh: one kernel per element type and row of the tile table, and its launch. instances/ holds the instances.
#pragma once
#include <cuda_runtime.h>

#include "cuda/common/attributes.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward_fma.cuh"
#include "cuda/sm80/forward_tf32.cuh"
#include "cuda/sm80/forward_wide.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T, int kVariant>
__global__ void __launch_bounds__(cuda::kForwardTiles[kVariant].threads(), cuda::kForwardTiles[kVariant].resident)
    forward_kernel(const __grid_constant__ ForwardCall call) {
  constexpr cuda::ForwardTile kTile = cuda::kForwardTiles[kVariant];
  if constexpr (kTile.body == cuda::Body::kFma) {
    ForwardFma<T, kTile>::run(call);
  } else if constexpr (kTile.body == cuda::Body::kTf32) {
    ForwardTf32<kTile>::run(call);
  } else if constexpr (kTile.body == cuda::Body::kWide) {
    ForwardWide<T, kTile>::run(call);
  } else {
    Forward<T, kTile>::run(call);
  }
}

template <class T, int kVariant>
cudaError_t launch_forward(const ForwardCall& call, int64_t blocks, cudaStream_t stream) {
  constexpr cuda::ForwardTile kTile = cuda::kForwardTiles[kVariant];
  constexpr int kBytes = static_cast<int>(cuda::forward_shared_bytes(kTile, sizeof(T)));
  if (const cudaError_t error = cuda::allow_shared_memory<forward_kernel<T, kVariant>>(kBytes); error != cudaSuccess)
    return error;
  forward_kernel<T, kVariant><<<static_cast<unsigned>(blocks), kTile.threads(), kBytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace flash::sm80
