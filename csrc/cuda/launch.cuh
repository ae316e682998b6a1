// cuda/launch.cuh: what the files of the CUDA door share: CUDA errors as sentences, and the small kernels around the big ones.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace flash::cuda {

// Null for cudaSuccess, else "<what>: <CUDA's text>." in storage of the calling thread.
Error sentence(cudaError_t error, const char* what);

// Adds up the partial results of a split forward call and writes problem.out and problem.lse.
// workspace: fp32 out [splits][lse count][value_dim], then lse [splits][lse count], both indexed by lse_offset().
cudaError_t combine(const problem::Problem& problem, int splits, const void* workspace, Stream stream);

// Blocks for `count` items dealt `per_block` at a time. Kernels of this room stride over what one grid cannot hold.
inline unsigned blocks_for(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < (int64_t{1} << 30) ? blocks : int64_t{1} << 30);
}

}  // namespace flash::cuda
