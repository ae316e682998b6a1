// Forward, 16-bit elements, head dims up to 256.
#include "cuda/sm80/forward_launch.cuh"

namespace flash::sm80 {

template cudaError_t launch_forward<__nv_bfloat16, 5>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 10>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 11>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 5>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 10>(const ForwardCall&, int64_t, cudaStream_t);
template cudaError_t launch_forward<__half, 11>(const ForwardCall&, int64_t, cudaStream_t);

}  // namespace flash::sm80
