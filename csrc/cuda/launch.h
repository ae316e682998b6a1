// cuda/launch.h: the door to the CUDA kernels, without torch. Launches on a stream, never synchronises, never allocates.
#pragma once
#include "problem/decode.h"
#include "problem/plan.h"
#include "problem/problem.h"

struct CUstream_st;

namespace flash::cuda {

using Stream = CUstream_st*;

// Null on success, else a sentence naming the kernel and CUDA's error. The tensors' device must be current.
using Error = const char*;

Error device(int index, problem::Device* device);  // properties, cached per index

Error forward(const problem::Problem& problem, const problem::Plan& plan, void* workspace, Stream stream);

Error backward(const problem::Problem& problem, const problem::Gradients& gradients, const problem::Plan& plan, void* workspace,
               Stream stream);

// A plan of plan_decode().
Error decode(const problem::Decode& decode, const problem::Plan& plan, void* workspace, Stream stream);

Error append(const problem::Append& append, Stream stream);

// Contiguous [count, value_dim] rows and [count] lse.
Error merge(problem::DType dtype, int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b,
            const void* lse_b, void* out, void* lse, Stream stream);

// 1 / 0 in a contiguous [batch, heads, rows, keys] array: what dropout keeps.
Error dropout_mask(const uint64_t* seed, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys, uint8_t* keep,
                   Stream stream);

}  // namespace flash::cuda
