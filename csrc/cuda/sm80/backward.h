// cuda/sm80/backward.h: runs the backward instance that a plan names. Torch-free.
#pragma once
#include <cuda_runtime.h>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::sm80 {

// plan.variant: row of cuda::kBackwardTiles; plan.load_bytes, plan.store_bytes: alignment of rows.
// Writes the gradients that are wanted and gradients.delta; adds to gradients.dmask, which arrives as zeros.
// workspace: cuda::backward_workspace() bytes. Rows outside of packed sequences are not written.
cudaError_t backward(const problem::Problem& problem, const problem::Gradients& gradients, const problem::Plan& plan,
                     void* workspace, cudaStream_t stream);

}  // namespace flash::sm80
