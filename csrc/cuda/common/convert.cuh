// common/convert.cuh: the fp32 sums of dQ in their private order (common/scratch.h): adding to them, and dq = scale * sum in the element
// type.
#pragma once
#include "cuda/common/divisor.h"
#include "cuda/common/locate.cuh"
#include "cuda/common/scratch.h"
#include "cuda/ptx/math.cuh"
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
  Divisor by_pieces{}, by_heads{};
  float scale = 0;
};

// A lane's accumulator of 16 rows x 8 columns.
__device__ __forceinline__ float4 read_private(const float* gGroup, int lane) {
  if constexpr (kVectors) return *reinterpret_cast<const float4*>(gGroup + private_element(lane, 0, true));
  return float4{gGroup[private_element(lane, 0, false)], gGroup[private_element(lane, 1, false)],
                gGroup[private_element(lane, 2, false)], gGroup[private_element(lane, 3, false)]};
}

// Four lanes have four words each; lane t leaves with word t of all of them.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      uint32_t &low = word[n], &high = word[n | bit];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, lane & bit ? low : high, bit);
      (lane & bit ? low : high) = other;
    }
}

// A warp takes 16 rows x 32 columns at a time; after a transpose each lane has 8 neighbouring columns.
template <class T>
__global__ void __launch_bounds__(kConvertWarps * 32) convert_kernel(const __grid_constant__ ConvertArguments a) {
  const problem::Problem& p = a.problem;
  uint32_t slot, head;
  int64_t batch = a.by_heads.divide(a.by_pieces.divide(blockIdx.x, &slot), &head);
  const int64_t piece = find_piece(p.cu_seqlens_q, p.batch, kConvertRows, slot, &batch);
  const problem::Sequence s = problem::sequence(p, batch);
  const int64_t first = piece * kConvertRows;
  if (piece < 0 || first >= s.rows) return;

  const float* gSum = a.scratch.dquery_block(a.scratch.first_block(s, head) + first / kBlockRows);
  const problem::Array& dq = a.gradients.dquery;
  T* gOut = static_cast<T*>(dq.data) + problem::offset(dq, batch, head, s.row + first);
  const bool aligned = ((dq.batch | dq.head | dq.row) & 7) == 0 && reinterpret_cast<uint64_t>(dq.data) % 16 == 0;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kConvertRows), s.rows - first));
  const int columns = static_cast<int>(a.scratch.columns), head_dim = static_cast<int>(p.head_dim);
  const int lane = threadIdx.x & 31, panels = (columns + 3) / 4;
#pragma unroll 2
  for (int index = threadIdx.x / 32; index < (rows + kBlockRows - 1) / kBlockRows * panels; index += kConvertWarps) {
    const int block = index / panels, group = (index - block * panels) * 4;
    float4 v[4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      v[n] = group + n < columns ? read_private(gSum + (block * columns + group + n) * kBlockElements, lane) : float4{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4];
#pragma unroll
      for (int n = 0; n < 4; ++n)
        word[n] =
            half == 0 ? ptx::pack(v[n].x * a.scale, v[n].y * a.scale, T()) : ptx::pack(v[n].z * a.scale, v[n].w * a.scale, T());
      transpose_quad(word, lane);
      const int row = block * kBlockRows + tile::lane_line(lane) + half * 8, column = (group + lane % 4) * 8;
      if (row >= rows) continue;
      T* to = gOut + row * dq.row + column;
      if (aligned && column + 8 <= head_dim) {
        *reinterpret_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (column + e < head_dim) reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>(word[e / 2] >> e % 2 * 16);
      }
    }
  }
}

}  // namespace flash::common
