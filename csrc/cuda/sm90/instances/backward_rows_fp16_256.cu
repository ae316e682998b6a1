// Backward, dQ by itself, fp16, head dims up to 256.
#include "cuda/sm90/backward_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_backward_rows<__half, 2>(const RowArguments&, unsigned, cudaStream_t);

}  // namespace flash::sm90
