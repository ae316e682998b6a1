// sm90/forward_output.cuh: the end of a tile: O / l and lse, whether the reference held, and the store through TMA, warp by warp.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/panels.cuh"

namespace flash::sm90 {

// Tiles with sums beyond these are done again with the row maximum followed: sums stay finite below, and probabilities fit fp16.
inline constexpr float kLimit = 0x1p64f, kHalfLimit = 6e4f;

// Of the slot that described the tile.
struct Finished {
  uint4 place, sequence, fate;
};

// The 16 rows of a warp, from row `first` of the tile on. `settle` is told whether the sums overflowed, before anything is stored;
// `staging`: kOutputs panels.
template <class C, class Settle>
__device__ __forceinline__ void store_rows(const ForwardArguments& p, const Finished& tile, int first, int lane, Settle settle,
                                           uint32_t staging, Rows rows, const float (&output)[C::kDim / 2]) {
  using T = typename C::T;
  const int row = static_cast<int>(tile.place.x) + first, head = static_cast<int>(tile.place.y);
  const int map_row = static_cast<int>(tile.sequence.z) + row, map_sequence = static_cast<int>(tile.sequence.w);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
  }
  float top[2];  // in log2 units
  rows.reference(p.scale_log2, top);
  bool fits = rows.sum[0] < kLimit && rows.sum[1] < kLimit && fabsf(top[0]) <= kLargest && fabsf(top[1]) <= kLargest;
  if constexpr (std::is_same_v<T, __half>) fits &= fmaxf(rows.peak[0], rows.peak[1]) < kHalfLimit;
  settle(__any_sync(~0u, !fits) && tile.fate.z == 0);
  if (lane == 0 && tile.fate.z != 0) ptx::wait_stores<0>();  // what overflowed may still be on its way to the same place
  float scale[2] = {1, 1};
  if (p.sinks != nullptr) fold_sink(__uint_as_float(tile.fate.w), rows.sum, top, scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) scale[r] = rows.sum[r] == 0 ? 0.f : scale[r] * ptx::reciprocal(rows.sum[r]);
  if (p.lse != nullptr) {
    const int length = static_cast<int>(tile.sequence.x), mine = row + lane / 4;
    const int64_t begin = p.cu_seqlens_q != nullptr ? map_sequence - length : map_sequence * p.lse_batch;
    float* to = p.lse + head * p.lse_head + begin + mine;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float lse = (top[r] + ptx::log2(rows.sum[r])) * static_cast<float>(problem::Softmax<double>::kLn2);
      if ((lane & 3) == 0 && mine + 8 * r < length) to[8 * r] = rows.sum[r] == 0 ? -INFINITY : lse;
    }
  }
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    const uint32_t to = staging + (panel % C::kOutputs) * C::kOutputPanel;
    if (lane == 0) ptx::wait_stores_read<C::kOutputs - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 rows x 16 columns
      const float* o = output + panel * 32 + j * 8;
      const uint32_t chunk = (2 * j + lane / 16) ^ (lane & 7);
      store_block<T>(to + (lane & 15) * 128 + chunk * 16, o, scale[0], scale[1]);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      ptx::store_box(&p.out, to, {64 * panel, map_row, head, map_sequence, p.cu_seqlens_q != nullptr ? kWrap : 0});
      ptx::commit_stores();
    }
  }
}

}  // namespace flash::sm90
