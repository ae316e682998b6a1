// Backward by plain arithmetic.
#include "cuda/sm80/backward_scalar_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_scalar_keys<float>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_rows<float>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_mask<float>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_keys<double>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_rows<double>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_mask<double>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
