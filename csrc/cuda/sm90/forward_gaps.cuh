// sm90/forward_gaps.cuh: rows of packed tensors that belong to no sequence: before, between and behind the sequences, and what of a
// sequence lies beyond its longest length. out = 0 and lse = -inf there. A warp that has nothing else to do clears them while the block
// computes: a launch of its own would cost a few microseconds, most of them for finding that there are no gaps.
#pragma once
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

// Gap i lies before sequence i; the last one behind all of them.
struct Gap {
  int from, count;
};
__device__ __forceinline__ Gap find_gap(const int32_t* cu_seqlens, int batch, int total, int longest, int i) {
  const auto start_of = [&](int sequence) { return min(max(cu_seqlens[sequence], 0), total); };
  int from = 0;
  if (i > 0) {
    const int start = start_of(i - 1);
    from = start + min(max(min(cu_seqlens[i], total) - start, 0), longest);
  }
  return {from, (i < batch ? start_of(i) : total) - from};
}

// By one warp of every block; blocks take turns at the rows.
__device__ __forceinline__ void clear_gaps(const ForwardArguments& p) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first <= p.batch; first += 32) {  // a lane looks at one gap
    const Gap mine =
        first + lane <= p.batch ? find_gap(p.cu_seqlens_q, p.batch, p.total_rows, p.rows, first + lane) : Gap{0, 0};
    for (uint32_t found = __ballot_sync(~0u, mine.count > 0); found != 0; found &= found - 1) {
      const int owner = __ffs(found) - 1;
      const int from = __shfl_sync(~0u, mine.from, owner), end = from + __shfl_sync(~0u, mine.count, owner);
      for (int row = from + blockIdx.x; row < end; row += gridDim.x) {
        char* to = p.gaps + row * p.gap_row + lane * 16;
        for (int head = 0; head < static_cast<int>(p.heads.value()); ++head, to += p.gap_head) {
          if (lane < p.gap_chunks) *reinterpret_cast<uint4*>(to) = uint4{};  // 32 chunks are 256 columns, the most there are
          if (lane == 0 && p.lse != nullptr) p.lse[head * p.lse_head + row] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flash::sm90
