// Decode, bf16, head dims up to 64, clusters.
#include "cuda/decode/kernel.cuh"

namespace flash::decode {

template cudaError_t launch<__nv_bfloat16, 6>(const Arguments&, dim3, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, 7>(const Arguments&, dim3, cudaStream_t);

}  // namespace flash::decode
