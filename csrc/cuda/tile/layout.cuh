// tile/layout.cuh: where the elements of a tile lie, in shared memory and in the lanes of a warp.
// A shared tile is [rows, cols]; its rows are cut into chunks of 16 bytes. The layouts keep 8 consecutive rows of one chunk in 8
// different bank groups, so ldmatrix and 16-byte accesses do not conflict. Plain integer arithmetic: tested on the host.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_TILE __host__ __device__ __forceinline__
#else
#define FLASH_TILE inline
#endif

namespace flash::tile {

FLASH_TILE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
FLASH_TILE constexpr int next_power_of_two(int x) {
  int y = 1;
  while (y < x) y *= 2;
  return y;
}

// 16-bit elements. The chunk index is xored with bits of the row: 3 bits where a row is a multiple of 128 bytes, 2 bits where it is
// an odd multiple of 64 (cols 96, 160, 224). Tiles start at multiples of 1024 bytes. Sizes in bytes.
template <int kCols_>
struct Swizzled {
  static constexpr int kCols = kCols_;
  static constexpr int kElementBytes = 2;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kChunks = kCols / 8;
  static constexpr bool kWide = kChunks % 8 == 0;
  static_assert(kChunks % 4 == 0, "a row must be a multiple of 64 bytes");

  static FLASH_TILE constexpr int bytes(int rows) { return rows * kRowBytes; }

  static FLASH_TILE uint32_t address(uint32_t tile, int row, int chunk) {
    const int swizzled = kWide ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
    return tile + row * kRowBytes + (swizzled << 4);
  }

  // From a lane address at chunk 0 or 1 to the one `step` times 16 columns further: one xor and an immediate.
  static FLASH_TILE uint32_t columns(uint32_t address, int step) {
    return kWide ? (address ^ ((step & 3) << 5)) + (step >> 2) * 128 : (address ^ ((step & 1) << 5)) + (step >> 1) * 64;
  }

  // From the address of a chunk to that of `n` chunks further, where n and the chunk's index have no bits in common.
  static FLASH_TILE uint32_t chunks(uint32_t address, int n) {
    return kWide ? (address ^ ((n & 7) << 4)) + (n >> 3) * 128 : (address ^ ((n & 3) << 4)) + (n >> 2) * 64;
  }

  // From the address of row r to that of row r + n, the chunk kept, where r is below a power of two that divides n.
  static FLASH_TILE uint32_t rows(uint32_t address, int n) {
    return (address ^ ((kWide ? n & 7 : (n >> 1) & 3) << 4)) + n * kRowBytes;
  }
};

// 32-bit elements, rows padded by 16 bytes; no swizzle.
template <int kCols_>
struct Padded {
  static constexpr int kCols = kCols_;
  static constexpr int kElementBytes = 4;
  static constexpr int kRowBytes = kCols * 4 + 16;
  static constexpr int kChunks = kCols / 4;

  static FLASH_TILE constexpr int bytes(int rows) { return rows * kRowBytes; }
  static FLASH_TILE uint32_t address(uint32_t tile, int row, int chunk) { return tile + row * kRowBytes + (chunk << 4); }
  static FLASH_TILE uint32_t columns(uint32_t address, int step) { return address + step * 32; }  // 8 columns a step
  static FLASH_TILE uint32_t rows(uint32_t address, int n) { return address + n * kRowBytes; }
};

// Which (row, chunk) of a 16 x 2-chunk block a lane's ldmatrix address names.
// RowBlock: A operand [16 rows, k16], or, transposed, B operand from [k16 rows, n16] (V in P V).
FLASH_TILE int row_block_row(int lane) { return lane & 15; }
FLASH_TILE int row_block_chunk(int lane) { return lane >> 4; }
// ColumnBlock: B operand from [n16 rows, k16] (K in Q K^T), or, transposed, A operand from [k16 rows, m16].
FLASH_TILE int column_block_row(int lane) { return (lane & 7) + ((lane >> 4) << 3); }
FLASH_TILE int column_block_chunk(int lane) { return (lane >> 3) & 1; }

// Register tiles of a warp, float[lines / 16][columns / 8][4]. Element [i][j][e] of an accumulator lies at
// line 16 i + 8 (e / 2) + lane / 4, column 8 j + 2 (lane % 4) + e % 2. As an A operand of 16-bit pairs: uint32_t[line block][k16 step][4].
FLASH_TILE int lane_line(int lane) { return lane >> 2; }
FLASH_TILE int lane_column(int lane) { return (lane & 3) * 2; }

}  // namespace flash::tile
