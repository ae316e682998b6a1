// Backward by plain arithmetic, bf16.
#include "cuda/sm80/backward_scalar_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_scalar_keys<__nv_bfloat16>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_rows<__nv_bfloat16>(BackwardCall, cudaStream_t);
template cudaError_t launch_scalar_mask<__nv_bfloat16>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
