// sm90/forward_launch.cuh: the instances of the Hopper forward. Defined in forward_instance.cuh for the files of instances/.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/tiles.h"

namespace flash::sm90 {

// Element type, row of kForwardTiles, whether a softcap acts on the scores.
template <class T, int kVariant, bool kCapped>
cudaError_t launch_forward(const ForwardArguments& arguments, unsigned blocks, cudaStream_t stream);

// The instance for a variant chosen at run time.
template <class T>
cudaError_t launch_forward(int variant, bool capped, const ForwardArguments& arguments, unsigned blocks, cudaStream_t stream) {
  static_assert(kForwardVariants == 7);  // 5 and 6: forward_stream_launch.cuh
  switch (variant * 2 + capped) {
    case 0:
      return launch_forward<T, 0, false>(arguments, blocks, stream);
    case 1:
      return launch_forward<T, 0, true>(arguments, blocks, stream);
    case 2:
      return launch_forward<T, 1, false>(arguments, blocks, stream);
    case 3:
      return launch_forward<T, 1, true>(arguments, blocks, stream);
    case 4:
      return launch_forward<T, 2, false>(arguments, blocks, stream);
    case 5:
      return launch_forward<T, 2, true>(arguments, blocks, stream);
    case 6:
      return launch_forward<T, 3, false>(arguments, blocks, stream);
    case 7:
      return launch_forward<T, 3, true>(arguments, blocks, stream);
    case 8:
      return launch_forward<T, 4, false>(arguments, blocks, stream);
    case 9:
      return launch_forward<T, 4, true>(arguments, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash::sm90
