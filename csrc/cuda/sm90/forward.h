// sm90/forward.h: host entry of the Hopper forward. Plan::variant is an index into sm90::kForwardTiles.
#pragma once
#include <cuda_runtime.h>

#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::sm90 {

cudaError_t forward(const problem::Problem& problem, const problem::Plan& plan, void* workspace, cudaStream_t stream);

}  // namespace flash::sm90
