// Forward instances: float by TF32 products, head dims up to 256.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<float, 16>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 19>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
