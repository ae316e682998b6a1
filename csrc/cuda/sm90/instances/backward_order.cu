// Backward, 16-bit elements, deterministic dQ beside dK and dV.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward<__nv_bfloat16, 7, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 7, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, 8, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 8, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16, 9, false>(const BackwardArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward<__half, 9, false>(const BackwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
