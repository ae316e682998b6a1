// Backward, fp32 by three TF32 products.
#include "cuda/sm80/backward_tf32_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_tf32_keys<10>(BackwardCall, cudaStream_t);
template cudaError_t launch_tf32_rows<8>(BackwardCall, cudaStream_t);
template cudaError_t launch_tf32_keys<11>(BackwardCall, cudaStream_t);
template cudaError_t launch_tf32_rows<9>(BackwardCall, cudaStream_t);

}  // namespace flash::sm80
