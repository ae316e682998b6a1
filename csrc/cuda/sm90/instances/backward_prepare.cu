// Backward, the kernels around the main one, 16-bit elements.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward_prepare<__nv_bfloat16>(int, const PrepareArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_convert<__nv_bfloat16>(int, const ConvertArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_prepare<__half>(int, const PrepareArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_convert<__half>(int, const ConvertArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
