// sm90/panels.cuh: matrices in shared memory as panels of 64 columns, [panel][row][128 bytes], swizzled: how they come through TMA or
// from accumulators, and products of their rows.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flash::sm90 {

// Rows from `row` on of one head to `to`; the bytes count towards `full`. row, head, sequence, wrap: coordinates of forward_work.cuh.
template <int kPanels>
__device__ __forceinline__ void load_panels(uint32_t to, uint32_t panel_bytes, const CUtensorMap* map, uint32_t full, int row,
                                            int head, int sequence, int wrap) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    ptx::load_box(to + panel * panel_bytes, map, full, {64 * panel, row, head, sequence, wrap});
}

// to [64 rows of a, rows of b] = a b^T over kDim columns, or += it; issued, not committed. a, b: K-major descriptors; kFirstPanel and
// kSecondPanel: the bytes of their panels.
template <class T, int kDim, uint32_t kFirstPanel, uint32_t kSecondPanel, bool kAccumulate = false, int kCount>
__device__ __forceinline__ void multiply_panels(float (&to)[kCount], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {  // 16 columns are 32 bytes of a panel's row; descriptors count 16 bytes
    const uint64_t first = a + (i / 4) * (kFirstPanel / 16) + (i % 4) * 2;
    const uint64_t second = b + (i / 4) * (kSecondPanel / 16) + (i % 4) * 2;
    if (i == 0 && !kAccumulate) {
      ptx::multiply_async<T, 0>(to, first, second);
    } else {
      ptx::multiply_async<T, 1>(to, first, second);
    }
  }
}

// 16 rows x 16 columns of an accumulator in the element type, the first 8 rows times `upper`, the others times `lower`. x: this lane's
// first of them; to: where this lane's row of the 8 x 8 matrices goes. References: an argument of the kernel is read where it is used.
template <class T>
__device__ __forceinline__ void store_block(uint32_t to, const float* x, const float& upper, const float& lower) {
  ptx::store_matrices(to, {ptx::pack(x[0] * upper, x[1] * upper, T()), ptx::pack(x[2] * lower, x[3] * lower, T()),
                           ptx::pack(x[4] * upper, x[5] * upper, T()), ptx::pack(x[6] * lower, x[7] * lower, T())});
}

}  // namespace flash::sm90
