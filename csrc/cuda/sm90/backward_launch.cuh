// sm90/backward_launch.cuh: the instances of the Hopper backward. Defined in backward_instance.cuh, a few per file of instances/.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/sm90/backward_prepare.cuh"
#include "cuda/sm90/backward_rows_config.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/tiles.h"

namespace flash::sm90 {

// The kernels around the main one, for a row of kBackwardTiles.
template <class T>
cudaError_t launch_backward_prepare(int variant, const PrepareArguments& arguments, unsigned blocks, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_convert(int variant, const ConvertArguments& arguments, unsigned blocks, cudaStream_t stream);

// The main kernel: element type, row of kBackwardTiles, whether a softcap acts on the scores.
template <class T, int kVariant, bool kCapped>
cudaError_t launch_backward(const BackwardArguments& arguments, unsigned blocks, cudaStream_t stream);

// The instance for a variant chosen at run time.
template <class T>
cudaError_t launch_backward(int variant, bool capped, const BackwardArguments& arguments, unsigned blocks,
                            cudaStream_t stream) {
  static_assert(kBackwardVariants == 10);
  switch (variant * 2 + capped) {
    case 0:
      return launch_backward<T, 0, false>(arguments, blocks, stream);
    case 2:
      return launch_backward<T, 1, false>(arguments, blocks, stream);
    case 3:
      return launch_backward<T, 1, true>(arguments, blocks, stream);
    case 4:
      return launch_backward<T, 2, false>(arguments, blocks, stream);
    case 5:
      return launch_backward<T, 2, true>(arguments, blocks, stream);
    case 7:
      return launch_backward<T, 3, true>(arguments, blocks, stream);
    case 8:
      return launch_backward<T, 4, false>(arguments, blocks, stream);
    case 10:
      return launch_backward<T, 5, false>(arguments, blocks, stream);
    case 12:
      return launch_backward<T, 6, false>(arguments, blocks, stream);
    case 14:
      return launch_backward<T, 7, false>(arguments, blocks, stream);
    case 16:
      return launch_backward<T, 8, false>(arguments, blocks, stream);
    case 18:
      return launch_backward<T, 9, false>(arguments, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

// dQ by itself: element type, row of kRowGradientTiles.
template <class T, int kVariant>
cudaError_t launch_backward_rows(const RowArguments& arguments, unsigned blocks, cudaStream_t stream);

template <class T>
cudaError_t launch_backward_rows(int variant, const RowArguments& arguments, unsigned blocks, cudaStream_t stream) {
  return variant == 0   ? launch_backward_rows<T, 0>(arguments, blocks, stream)
         : variant == 1 ? launch_backward_rows<T, 1>(arguments, blocks, stream)
                        : launch_backward_rows<T, 2>(arguments, blocks, stream);
}

}  // namespace flash::sm90
