// Backward by plain arithmetic, fp32.
#include "cuda/sm80/backward_scalar_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_scalar_keys<float>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_rows<float>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_mask<float>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
