// sm90/counters.h: the two counters of a persistent launch (next tile, finished blocks), zero when it starts.
#pragma once
#include <cuda_runtime.h>

namespace flash::sm90 {

// Counters for one launch on `stream`. Launches of a stream follow each other and leave their counters at zero, so a stream keeps its
// own; where that does not hold (a captured graph may be replayed anywhere, cudaStreamPerThread is many streams) the 16 bytes at
// `workspace` are cleared by a memset before the launch, which costs about 2 microseconds.
cudaError_t counters(cudaStream_t stream, void* workspace, unsigned** found);

}  // namespace flash::sm90
