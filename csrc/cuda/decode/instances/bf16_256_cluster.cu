// Decode, bf16, head dims up to 256, clusters.
#include "cuda/decode/kernel.cuh"

namespace flash::decode {

template cudaError_t launch<__nv_bfloat16, 10>(const Arguments&, dim3, cudaStream_t);

}  // namespace flash::decode
