// cuda/sm80/forward.h: runs the forward instance that a plan names. Torch-free.
#pragma once
#include <cuda_runtime.h>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::sm80 {

// plan.variant: row of cuda::kForwardTiles; plan.load_bytes, plan.store_bytes: alignment of rows (16 for plain instances);
// plan.splits > 1: partial results go to the workspace, cuda::combine() adds them up afterwards.
// Rows outside of packed sequences are not written.
cudaError_t forward(const problem::Problem& problem, const problem::Plan& plan, void* workspace, cudaStream_t stream);

}  // namespace flash::sm80
