// Forward, fp32 by one TF32 product.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<float, 17>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 18>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 19>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
