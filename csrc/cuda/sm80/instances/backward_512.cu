// Backward with every feature, 16-bit elements, head dims up to 512.
#include "cuda/sm80/backward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_keys<__nv_bfloat16, 9>(BackwardCall, cudaStream_t);
template cudaError_t launch_keys<__half, 9>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
