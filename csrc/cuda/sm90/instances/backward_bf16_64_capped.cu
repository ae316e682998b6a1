// Backward, bf16, head dims up to 64, softcap.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward<__nv_bfloat16, 3, true>(const BackwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
