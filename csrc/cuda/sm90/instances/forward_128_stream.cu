// Forward, 16-bit elements, head dims up to 128, windows of long sequences.
#include "cuda/sm90/forward_stream_instance.cuh"

namespace flash::sm90 {

template cudaError_t launch_stream<__nv_bfloat16, 6>(const StreamArguments&, cudaStream_t);
template cudaError_t launch_stream<__half, 6>(const StreamArguments&, cudaStream_t);

}  // namespace flash::sm90
