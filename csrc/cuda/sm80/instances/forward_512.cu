// Forward, 16-bit elements, head dims up to 512.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<__nv_bfloat16, 12>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 13>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 12>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 13>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
