// cuda/merge.cu: adds finished partial results up by their lse: the merge operator, and the split keys of a forward call.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "problem/coords.h"
#include "problem/softmax.h"

namespace flash::cuda {
namespace {

using problem::DType;
using problem::Problem;

constexpr int kWarps = 4;  // of a block; a warp takes one row
constexpr int kThreads = 32 * kWarps;

template <class Element>
struct Accumulate {
  using Type = float;
};
template <>
struct Accumulate<double> {
  using Type = double;
};

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ __forceinline__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(double* to, double x) { *to = x; }

template <class Element, class Real>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(int64_t count, int64_t value_dim, const Element* out_a, const Real* lse_a, const Element* out_b,
                 const Real* lse_b, Element* out, Real* lse) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < count; row += int64_t{gridDim.x} * kWarps) {
    const Real of_a = lse_a[row], of_b = lse_b[row];
    const problem::Merge<Real> weight = problem::merge(of_a, of_b);
    for (int64_t i = row * value_dim + lane; i < (row + 1) * value_dim; i += 32)
      store(out + i,
            problem::weigh(weight.a, of_a, Real(widen(out_a[i]))) + problem::weigh(weight.b, of_b, Real(widen(out_b[i]))));
    if (lane == 0) lse[row] = weight.lse;
  }
}

// A warp takes 32 columns of one row through all its parts. Columns are split over warps because rows are few when keys are split.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const Problem p, int splits, const float* part_out, const float* part_lse, int64_t lse_count) {
  const int lane = threadIdx.x % 32;
  const int64_t slices = (p.value_dim + 31) / 32, tasks = p.batch * p.heads * p.rows * slices;
  for (int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; task < tasks; task += int64_t{gridDim.x} * kWarps) {
    const int64_t slice = task % slices, row = task / slices % p.rows, plane = task / slices / p.rows;
    const int64_t batch = plane / p.heads, head = plane % p.heads;
    const problem::Sequence sequence = problem::sequence(p, batch);
    if (row >= sequence.rows) continue;
    const int64_t at = problem::lse_offset(p, batch, head, sequence.row + row);
    const int64_t column = slice * 32 + lane;
    const bool inside = column < p.value_dim;
    float value = 0, lse = -INFINITY;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const int64_t part = split * lse_count + at;
      const float x = inside ? part_out[part * p.value_dim + column] : 0.f;
      const float of_part = part_lse[part];
      const problem::Merge<float> weight = problem::merge(lse, of_part);
      value = problem::weigh(weight.a, lse, value) + problem::weigh(weight.b, of_part, x);
      lse = weight.lse;
    }
    if (inside)
      store(static_cast<Element*>(p.out.data) + problem::offset(p.out, batch, head, sequence.row + row) + column, value);
    if (slice == 0 && lane == 0 && p.lse != nullptr) static_cast<float*>(p.lse)[at] = lse;
  }
}

template <class Element>
cudaError_t launch_merge(int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b,
                         const void* lse_b, void* out, void* lse, Stream stream) {
  using Real = typename Accumulate<Element>::Type;
  merge_kernel<<<blocks_for(count, kWarps), kThreads, 0, stream>>>(
      count, value_dim, static_cast<const Element*>(out_a), static_cast<const Real*>(lse_a), static_cast<const Element*>(out_b),
      static_cast<const Real*>(lse_b), static_cast<Element*>(out), static_cast<Real*>(lse));
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_combine(const Problem& p, int splits, const void* workspace, Stream stream) {
  const int64_t lse_count = p.packed() ? p.heads * p.total_rows : p.batch * p.heads * p.rows;
  const float* out = static_cast<const float*>(workspace);
  const int64_t tasks = p.batch * p.heads * p.rows * ((p.value_dim + 31) / 32);
  combine_kernel<Element>
      <<<blocks_for(tasks, kWarps), kThreads, 0, stream>>>(p, splits, out, out + splits * lse_count * p.value_dim, lse_count);
  return cudaGetLastError();
}

}  // namespace

Error merge(DType dtype, int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b,
            const void* lse_b, void* out, void* lse, Stream stream) {
  if (count == 0) return nullptr;
  const auto launch = dtype == DType::kFloat16    ? launch_merge<__half>
                      : dtype == DType::kBFloat16 ? launch_merge<__nv_bfloat16>
                      : dtype == DType::kFloat32  ? launch_merge<float>
                                                  : launch_merge<double>;
  return sentence(launch(count, value_dim, out_a, lse_a, out_b, lse_b, out, lse, stream), "flash.merge on CUDA");
}

cudaError_t combine(const Problem& problem, int splits, const void* workspace, Stream stream) {
  const auto launch = problem.dtype == DType::kFloat16    ? launch_combine<__half>
                      : problem.dtype == DType::kBFloat16 ? launch_combine<__nv_bfloat16>
                                                          : launch_combine<float>;
  return launch(problem, splits, workspace, stream);
}

}  // namespace flash::cuda
