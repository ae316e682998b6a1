// sm90/gaps.cuh: rows of packed tensors that belong to no sequence: before, between and behind the sequences, and what of a sequence lies
// beyond its longest length.
#pragma once
#include <cstdint>

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

// clear(row) for all rows of gap(0) to gap(batch), by warp `warp` of the `warps` that take turns at the rows.
template <class FindGap, class Clear>
__device__ __forceinline__ void for_each_gap_row(int batch, const FindGap& gap, int warp, int warps, const Clear& clear) {
  const int lane = threadIdx.x & 31;
  for (int first = 0; first <= batch; first += 32) {  // a lane looks at one gap
    const Gap mine = first + lane <= batch ? gap(first + lane) : Gap{0, 0};
    for (uint32_t found = __ballot_sync(~0u, mine.count > 0); found != 0; found &= found - 1) {
      const int owner = __ffs(found) - 1;
      const int from = __shfl_sync(~0u, mine.from, owner), end = from + __shfl_sync(~0u, mine.count, owner);
      for (int row = from + warp; row < end; row += warps) clear(row);
    }
  }
}

}  // namespace flash::sm90
