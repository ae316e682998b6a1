// Decode, bf16, head dims up to 128, Hopper: three stages, clusters.
#include "cuda/decode/kernel.cuh"

namespace flash::decode {

template cudaError_t launch<__nv_bfloat16, 5>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 8>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 9>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 11>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 12>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 13>(const Arguments&, dim3, cudaStream_t);

}  // namespace flash::decode
