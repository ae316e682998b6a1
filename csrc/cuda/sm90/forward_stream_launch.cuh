// sm90/forward_stream_launch.cuh: the instances of the Hopper forward for streams. Defined in forward_stream_instance.cuh for the files
// of instances/.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/sm90/forward_stream.h"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

struct StreamArguments {
  ForwardArguments call;  // its tiles, sections, counter and gaps are not used
  Stream stream;
};

// Element type, row of kForwardTiles.
template <class T, int kVariant>
cudaError_t launch_stream(const StreamArguments& arguments, cudaStream_t stream);

// The instance for a variant chosen at run time.
template <class T>
cudaError_t launch_stream(int variant, const StreamArguments& arguments, cudaStream_t stream) {
  return variant == 5 ? launch_stream<T, 5>(arguments, stream) : launch_stream<T, 6>(arguments, stream);
}

}  // namespace flash::sm90
