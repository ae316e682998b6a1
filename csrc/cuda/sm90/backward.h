// sm90/backward.h: host entry of the Hopper backward. Plan::variant is an index into sm90::kBackwardTiles.
#pragma once
#include <cuda_runtime.h>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::sm90 {

cudaError_t backward(const problem::Problem& problem, const problem::Gradients& gradients, const problem::Plan& plan,
                     void* workspace, cudaStream_t stream);

}  // namespace flash::sm90
