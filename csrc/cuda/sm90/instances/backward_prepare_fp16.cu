// Backward, the kernels around the main one, fp16.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward_prepare<__half>(int, const PrepareArguments&, unsigned, cudaStream_t);
template cudaError_t launch_backward_convert<__half>(int, const ConvertArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
