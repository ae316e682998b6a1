// Forward, 16-bit elements, head dims up to 128, narrow windows, without and with a softcap.
#include "cuda/sm90/forward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_forward<__nv_bfloat16, 4, false>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 4, true>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__half, 4, false>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__half, 4, true>(const ForwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
