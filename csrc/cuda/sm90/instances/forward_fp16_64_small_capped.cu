// Forward, fp16, head dims up to 64, few keys, softcap.
#include "cuda/sm90/forward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_forward<__half, 0, true>(const ForwardArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
