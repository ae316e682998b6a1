// sm90/forward_gaps.cuh: out = 0 and lse = -inf in rows of packed tensors that belong to no sequence. A warp that has nothing else to do
// clears them while the block computes: a launch of its own would cost a few microseconds, most of them for finding that there are none.
#pragma once
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/gaps.cuh"

namespace flash::sm90 {

// By one warp of every block.
__device__ __forceinline__ void clear_gaps(const ForwardArguments& p) {
  const int lane = threadIdx.x & 31;
  const auto gap = [&](int i) { return find_gap(p.cu_seqlens_q, p.batch, p.total_rows, p.rows, i); };
  for_each_gap_row(p.batch, gap, blockIdx.x, gridDim.x, [&](int row) {
    char* to = p.gaps + row * p.gap_row + lane * 16;
    for (int head = 0; head < static_cast<int>(p.heads.value()); ++head, to += p.gap_head) {
      if (lane < p.gap_chunks) *reinterpret_cast<uint4*>(to) = uint4{};  // 32 chunks are 256 columns, the most there are
      if (lane == 0 && p.lse != nullptr) p.lse[head * p.lse_head + row] = -INFINITY;
    }
  });
}

}  // namespace flash::sm90
