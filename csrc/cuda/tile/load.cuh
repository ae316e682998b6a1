// tile/load.cuh: a [kRows, Layout::kCols] tile from global to shared memory by all threads of a block.
// Rows past the end and columns past the row's bytes become zeros, so nothing that lies there is ever multiplied.
#pragma once
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/layout.cuh"

namespace flash::tile {

// How the threads share a tile: a power of two of lanes per row, kStep rows at a time, one 16-byte chunk each.
template <class Layout, int kRows, int kThreads>
struct Loader {
  static constexpr int kLanes = next_power_of_two(Layout::kChunks);
  static constexpr int kStep = kThreads / kLanes;
  static constexpr int kPasses = kRows / kStep;
  static_assert(kStep > 0 && kRows % kStep == 0);

  static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kLanes; }

  // A tile that lies inside the array, rows of 16-byte chunks: no predicates. `to`: address of (row(), chunk()) in the tile.
  // `from`: this thread's first chunk; stride: bytes between rows; active: chunk() lies inside the row.
  static __device__ __forceinline__ void load_inside(uint32_t to, const char* from, int64_t stride, bool active) {
    const int64_t step = stride * kStep;
    if (active) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i, from += step) ptx::copy_16(Layout::rows(to, i * kStep), from);
    }
  }

  // Any tile, 16-byte chunks. from: the tile's first element; rows: how many exist (> 0); row_bytes: length of a row.
  static __device__ __forceinline__ void load(uint32_t tile, const char* from, int64_t stride, int rows, int row_bytes) {
    const char* source = from + row() * stride + chunk() * 16;
    const int64_t step = stride * kStep;
    const bool active = chunk() * 16 < row_bytes;
    if (rows >= kRows && active) {
      load_inside(Layout::address(tile, row(), chunk()), source, stride, true);
    } else if (Layout::kChunks == kLanes || chunk() < Layout::kChunks) {
#pragma unroll 1
      for (int i = 0; i < kPasses; ++i, source += step) {
        const bool inside = active && row() + i * kStep < rows;
        ptx::copy_16(Layout::address(tile, row() + i * kStep, chunk()), inside ? source : from, inside ? 16 : 0);
      }
    }
  }

  // The same for rows that are aligned to `width` bytes only: 8, or 4 where elements have 4.
  static __device__ __forceinline__ void load_narrow(uint32_t tile, const char* from, int64_t stride, int rows, int row_bytes,
                                                     int width) {
    if (Layout::kElementBytes == 2 || width == 8) {
      copy_narrow<8>(tile, from, stride, rows, row_bytes);
    } else {
      copy_narrow<4>(tile, from, stride, rows, row_bytes);
    }
  }

  // Zeros in the columns past row_bytes of `tiles` consecutive tiles: load_inside leaves them alone.
  static __device__ __forceinline__ void clear_columns(uint32_t tile, int tiles, int row_bytes) {
    if (chunk() * 16 < row_bytes || chunk() >= Layout::kChunks) return;
    for (int i = row(); i < tiles * kRows; i += kStep) ptx::store_shared(Layout::address(tile, i, chunk()), uint4{0, 0, 0, 0});
  }

 private:
  template <int kWidth>
  static __device__ __forceinline__ void copy_narrow(uint32_t tile, const char* from, int64_t stride, int rows, int row_bytes) {
    constexpr int kPieces = Layout::kChunks * 16 / kWidth;  // of a row
    int n = threadIdx.x;
    asm volatile("" : "+r"(n));  // else the addresses of this rare path are kept in registers that the loop around it needs
#pragma unroll 1
    for (; n < kRows * kPieces; n += kThreads) {
      const int row = n / kPieces, byte = n % kPieces * kWidth;
      const bool inside = row < rows && byte < row_bytes;
      const char* source = inside ? from + row * stride + byte : from;
      const uint32_t to = Layout::address(tile, row, byte / 16) + byte % 16;
      if constexpr (kWidth == 8) {
        ptx::copy_8(to, source, inside ? 8 : 0);
      } else {
        ptx::copy_4(to, source, inside ? 4 : 0);
      }
    }
  }
};

}  // namespace flash::tile
