// Forward by plain arithmetic.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<float, 20>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<double, 20>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
