// Decode, fp16, head dims up to 64.
#include "cuda/decode/kernel.cuh"

namespace flash::decode {

template cudaError_t launch<__half, 0>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 1>(const Arguments&, dim3, cudaStream_t);

}  // namespace flash::decode
