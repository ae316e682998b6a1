// common/convert.cuh: the fp32 sums of dQ in their private order (common/scratch.h): adding to them, and dq = scale * sum in the element
// type.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/locate.cuh"
#include "cuda/common/scratch.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/layout.cuh"

namespace flash::common {

inline constexpr int kConvertWarps = 8;
inline constexpr int kConvertRows = 64;  // of a CUDA block

// Whether four floats are added at once. Both kernels of a call are code of the same architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kVectors = true;
#else
inline constexpr bool kVectors = false;
#endif

// Adds a lane's accumulator to the sums of 16 rows x 8 columns.
__device__ __forceinline__ void add_private(float* gGroup, int lane, const float (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::reduce_add_4(gGroup + private_element(lane, 0, true), r[0], r[1], r[2], r[3]);
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) ptx::reduce_add(gGroup + private_element(lane, e, false), r[e]);
#endif
}

struct ConvertArguments {
  problem::Problem problem;
  problem::Gradients gradients;
  Scratch scratch;
  int64_t pieces = 0;  // of kConvertRows rows, per plane
  float scale = 0;
};

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T low, high;
};

// A warp takes 16 rows x 8 columns at a time.
template <class T>
__global__ void __launch_bounds__(kConvertWarps * 32) convert_kernel(const __grid_constant__ ConvertArguments a) {
  const problem::Problem& p = a.problem;
  const int64_t plane = blockIdx.x / a.pieces, slot = blockIdx.x - plane * a.pieces;
  int64_t batch = plane / p.heads;
  const int64_t head = plane - batch * p.heads;
  const int64_t piece = find_piece(p.cu_seqlens_q, p.batch, kConvertRows, slot, &batch);
  const problem::Sequence s = problem::sequence(p, batch);
  const int64_t first = piece * kConvertRows;
  if (piece < 0 || first >= s.rows) return;

  const float* gSum = a.scratch.dquery_block(a.scratch.first_block(s, head) + first / kBlockRows);
  const problem::Array& dq = a.gradients.dquery;
  T* gOut = static_cast<T*>(dq.data) + problem::offset(dq, batch, head, s.row + first);
  const bool pairs = ((dq.batch | dq.head | dq.row) & 1) == 0 && reinterpret_cast<uint64_t>(dq.data) % sizeof(Two<T>) == 0;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kConvertRows), s.rows - first));
  const int columns = static_cast<int>(a.scratch.columns), head_dim = static_cast<int>(p.head_dim);
  const int lane = threadIdx.x & 31, groups = (rows + kBlockRows - 1) / kBlockRows * columns;
#pragma unroll 2
  for (int group = threadIdx.x / 32; group < groups; group += kConvertWarps) {
    const float* gGroup = gSum + group * kBlockElements;
    float v[4];
    if constexpr (kVectors) {
      const float4 four = *reinterpret_cast<const float4*>(gGroup + lane * 4);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = gGroup[private_element(lane, e, false)];
    }
    const int block = group / columns, column = (group - block * columns) * 8 + tile::lane_column(lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block * kBlockRows + tile::lane_line(lane) + half * 8;
      if (row >= rows) continue;
      T* to = gOut + row * dq.row + column;
      const T low = rounded<T>(v[2 * half] * a.scale), high = rounded<T>(v[2 * half + 1] * a.scale);
      if (pairs && column + 1 < head_dim) {
        *reinterpret_cast<Two<T>*>(to) = {low, high};
      } else {
        if (column < head_dim) to[0] = low;
        if (column + 1 < head_dim) to[1] = high;
      }
    }
  }
}

}  // namespace flash::common
