// Backward, fp16, head dims up to 128.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward<__half, 1, false>(const BackwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
