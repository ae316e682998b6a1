// Forward, 16-bit elements, head dims up to 192.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<__nv_bfloat16, 4>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 9>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 4>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 9>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
