// sm90/gaps.h: see gaps.cu.
#pragma once
#include <cuda_runtime.h>

#include "problem/problem.h"

namespace flash::sm90 {

// out = 0 and lse = -inf in the rows of packed tensors before, between and behind the sequences, and in what of a sequence lies
// beyond its longest length. A few microseconds, where clearing all of out costs as long as writing it.
cudaError_t clear_gaps(const problem::Problem& p, cudaStream_t stream);

}  // namespace flash::sm90
