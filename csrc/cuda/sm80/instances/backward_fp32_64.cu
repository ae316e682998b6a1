// Backward, fp32, head dims up to 64.
#include "cuda/sm80/backward_tf32_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_tf32_keys<10>(BackwardCall, cudaStream_t);
template cudaError_t launch_tf32_rows<8>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
