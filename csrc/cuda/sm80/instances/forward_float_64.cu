// Forward instances: float by TF32 products, head dims up to 64.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<float, 14>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<float, 17>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
