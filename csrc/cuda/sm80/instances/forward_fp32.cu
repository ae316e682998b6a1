// Forward, fp32 by three TF32 products.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<float, 14>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 15>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 16>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
