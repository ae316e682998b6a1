// cuda/launch.cuh: what the files of the CUDA door share: CUDA errors as sentences, and the small kernels around the big ones.
//
// What plan.cpp, this room and the kernels of sm80/ agree on:
//  * Tiles (tiles.h) are chosen by type, head dims, lengths, features and Device::shared_memory (bytes a block may opt in to: 232448 on
//    9.0, 166912 on 8.0, 101376 on 8.6 and 8.9). No fitting tile is -1: the call is refused with a sentence.
//  * Plan::load_bytes is the load of query, key, value (in backward also dout) that pointers, strides and dims allow. Every chunk of
//    load_bytes that starts inside a row may be read whole: operands that op/ copied have rows padded with zeros. Backward reads
//    problem.out for delta at any alignment. Stores: Plan::store_bytes, any dim.
//  * Splits > 1: split s of a block of rows folds its share of the keys and writes fp32 partial results to the workspace: normalised
//    out [splits][lse count][value_dim], then lse [splits][lse count], indexed by lse_offset(), -inf and 0 where a row saw nothing.
//    Split 0 alone folds the sink. combine() writes the final out and lse.
//  * Packed rows and keys outside every sequence arrive filled by op/ (0, lse -inf): kernels leave them alone.
//  * Kernels set their shared-memory attribute through common/attributes.cuh, launch on the given stream, and return cudaError_t.
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
