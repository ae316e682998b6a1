// sm80/backward_launch.h: the launches of the backward kernels. Defined in backward_launch.cuh, instantiated in instances/.
#pragma once
#include <cuda_runtime.h>

#include "cuda/sm80/backward_block.cuh"

namespace flash::sm80 {

// dK, dV (and sums of dQ) by row kVariant of cuda::kBackwardTiles.
template <class T, int kVariant>
cudaError_t launch_keys(BackwardCall call, cudaStream_t stream);

// dQ by row kVariant of cuda::kRowGradientTiles.
template <class T, int kVariant>
cudaError_t launch_rows(BackwardCall call, cudaStream_t stream);

// fp32: dK, dV and dQ; dQ by itself.
template <int kVariant>
cudaError_t launch_tf32_keys(BackwardCall call, cudaStream_t stream);
template <int kVariant>
cudaError_t launch_tf32_rows(BackwardCall call, cudaStream_t stream);

// Plain arithmetic, sums in Real: dK and dV; dQ; the gradient of the mask.
template <class Real>
cudaError_t launch_scalar_keys(BackwardCall call, cudaStream_t stream);
template <class Real>
cudaError_t launch_scalar_rows(BackwardCall call, cudaStream_t stream);
template <class Real>
cudaError_t launch_scalar_mask(BackwardCall call, cudaStream_t stream);

}  // namespace flash::sm80
