// Forward, 16-bit elements, head dims up to 64.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<__nv_bfloat16, 0>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 1>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 6>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 0>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 1>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 6>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
