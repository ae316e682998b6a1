// tile/store.cuh: register tiles to shared memory, shared tiles to global memory.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/layout.cuh"

namespace flash::tile {

// Two neighbouring columns of an accumulator, rounded to T. chunk: of 8 columns; lane_column(lane) is added here.
template <class T, class Layout>
__device__ __forceinline__ void store_pair(uint32_t tile, int row, int chunk, int lane, float low, float high) {
  ptx::store_shared(Layout::address(tile, row, chunk) + (lane & 3) * 4, ptx::pack(low, high, T()));
}

// An accumulator, rounded to T. line: address of chunk 0 of this lane's first line, or of a later one; chunk(j): how much further column
// block j lies, without bits that the index of that chunk has.
template <class T, class Layout, int kI, int kJ, class Chunk>
__device__ __forceinline__ void store_accumulator(uint32_t line, const float (&r)[kI][kJ][4], int lane, Chunk chunk) {
#pragma unroll
  for (int j = 0; j < kJ; ++j) {
    const uint32_t to = Layout::chunks(line, chunk(j)) + (lane & 3) * 4;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(to + (i * 16 + half * 8) * Layout::kRowBytes,
                          ptx::pack(r[i][j][2 * half], r[i][j][2 * half + 1], T()));
  }
}

// Rows [0, rows) and row_bytes of a shared tile of 16-bit elements to global memory, by kThreads threads of which this is `thread`.
// first: first row in the shared tile, which holds kRows from there; stride: bytes. width: alignment of the destination, 16 or less.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void store_rows(char* to, int64_t stride, uint32_t tile, int first, int rows, int row_bytes,
                                           int width, int thread) {
#pragma unroll 4
  for (int n = thread; n < kRows * Layout::kChunks; n += kThreads) {
    const int row = n / Layout::kChunks, chunk = n % Layout::kChunks;
    if (row >= rows || chunk * 16 >= row_bytes) continue;
    const uint4 v = ptx::load_shared_16(Layout::address(tile, first + row, chunk));
    char* destination = to + row * stride + chunk * 16;
    if (width == 16) {
      *reinterpret_cast<uint4*>(destination) = v;
    } else {
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (chunk * 16 + e * 2 < row_bytes)
          reinterpret_cast<uint16_t*>(destination)[e] = static_cast<uint16_t>(words[e / 2] >> (e & 1) * 16);
    }
  }
}

}  // namespace flash::tile
