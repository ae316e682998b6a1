// Backward without score modifiers, 16-bit elements, head dims up to 192.
#include "cuda/sm80/backward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_keys<__nv_bfloat16, 3>(BackwardCall, cudaStream_t);
template cudaError_t launch_keys<__half, 3>(BackwardCall, cudaStream_t);
template cudaError_t launch_rows<__nv_bfloat16, 3>(BackwardCall, cudaStream_t);
template cudaError_t launch_rows<__half, 3>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
