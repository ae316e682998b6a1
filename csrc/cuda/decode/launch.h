// decode/launch.h: the instances of the decode kernel, defined in instances/, and the host code around them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/decode/arguments.cuh"
#include "cuda/decode/tiles.h"
#include "problem/decode.h"

namespace flash::decode {

// Element type, row of kTiles.
template <class T, int kVariant>
cudaError_t launch(const Arguments& arguments, dim3 grid, cudaStream_t stream);

// Any type, head dim and stride, by plain arithmetic: right, not fast.
cudaError_t launch_scalar(const problem::Decode& decode, cudaStream_t stream);

cudaError_t run(const problem::Decode& decode, const problem::Plan& plan, void* workspace, cudaStream_t stream);

cudaError_t append(const problem::Append& append, cudaStream_t stream);

// `count` tickets for one launch on `stream`, all zero; launches leave them so. Those of a stream, or of a stream under capture, are its
// own. Where there are none left, `workspace` (4 bytes each) is cleared by a memset before the launch.
cudaError_t tickets(cudaStream_t stream, int64_t count, void* workspace, unsigned** found);

}  // namespace flash::decode
