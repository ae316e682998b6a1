// Backward, dQ by itself, 16-bit elements.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward_rows<__nv_bfloat16, 0>(const RowArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_rows<__half, 0>(const RowArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_rows<__nv_bfloat16, 1>(const RowArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_rows<__half, 1>(const RowArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_rows<__nv_bfloat16, 2>(const RowArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_rows<__half, 2>(const RowArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
