// Backward with every feature, bf16, head dims up to 512.
#include "cuda/sm80/backward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_keys<__nv_bfloat16, 9>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
