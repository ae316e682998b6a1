// Decode, fp16, head dims up to 128, Hopper: three stages, clusters.
#include "cuda/decode/kernel.cuh"

namespace flash::decode {

template cudaError_t launch<__half, 5>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 8>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 9>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 11>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 12>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__half, 13>(const Arguments&, dim3, cudaStream_t);

}  // namespace flash::decode
