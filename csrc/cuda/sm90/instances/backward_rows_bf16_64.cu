// Backward, dQ by itself, bf16, head dims up to 64.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward_rows<__nv_bfloat16, 0>(const RowArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
