// Forward, 16-bit elements, head dims up to 96.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<__nv_bfloat16, 2>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 7>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 2>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 7>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
