// Backward by plain arithmetic, fp16.
#include "cuda/sm80/backward_scalar_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_scalar_keys<__half>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_rows<__half>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_mask<__half>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
