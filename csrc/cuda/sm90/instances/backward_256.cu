// Backward, 16-bit elements, head dims up to 256, without and with a softcap, and without dQ.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward<__nv_bfloat16, 2, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, 2, true>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 2, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 2, true>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, 6, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 6, false>(const BackwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
