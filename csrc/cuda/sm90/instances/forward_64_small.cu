// Forward, 16-bit elements, head dims up to 64, in small blocks, without and with a softcap.
#include "cuda/sm90/forward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_forward<__nv_bfloat16, 0, false>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__nv_bfloat16, 0, true>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__half, 0, false>(const ForwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_forward<__half, 0, true>(const ForwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
