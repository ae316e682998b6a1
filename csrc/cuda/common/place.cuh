// common/place.cuh: where the accumulator of a warp lies among the rows and keys of a sequence.
#pragma once
#include <cstdint>

#include "cuda/tile/layout.cuh"

namespace flash::common {

// Where a fragment lies. Element [i][j][e] of this lane is line `line` + 16 i + 8 (e / 2), column `column` + 8 j + e % 2 of a tile
// whose corner is (row, key) of the sequence. The corner is the same for all threads of a block.
struct Place {
  int64_t row, key;
  int line, column;
  __device__ __forceinline__ Place(int64_t row, int64_t key, int first_line, int first_column, int lane)
      : row(row), key(key), line(first_line + tile::lane_line(lane)), column(first_column + tile::lane_column(lane)) {}
};

__device__ __forceinline__ int narrow(int64_t x) {  // far values stay far
  constexpr int64_t kFar = 1 << 29;
  return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
}

}  // namespace flash::common
