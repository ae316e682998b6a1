// cpu/dot.h: the product of bf16 matrices with the instruction of AVX-512 that multiplies 16 pairs by 16 pairs and adds up each. As in
// tile.h, lanes are columns and the left factor is broadcast, here pair by pair.
#pragma once
#include "cpu/pairs.h"

namespace flash::cpu {
namespace {

FLASH_INLINE void begin_products() {}
FLASH_INLINE void end_products() {}

FLASH_INLINE Vector<float> dot(Vector<float> sum, Word a, Word b) {
  return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// c[row][column] = (kAdd: what is there +) sum over k of a[row][k] * b[k / 2][column][k % 2], for V vectors of columns.
template <int V, bool kAdd>
FLASH_STAGE void multiply(Left a, const BFloat16* b, int64_t pair_stride, int64_t inner, float* c, int64_t c_stride,
                          int64_t rows) {
  constexpr int W = kWidth<float>;
  by_rows<kRows[V]>(0, rows, [&](auto rows_of_block, int64_t row) FLASH_LAMBDA {
    constexpr int R = decltype(rows_of_block)::value;
    Vector<float> acc[R][V];
    float* const to = c + row * c_stride;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = kAdd ? load(to + r * c_stride + v * W) : Vector<float>{};
    const BFloat16 *left = a.data + row / 16 * a.strip + row % 16 * a.row, *right = b;
    for (int64_t k = 0; k < inner; k += kPanel, left += a.panel) {
      const BFloat16* fours[(R + 3) / 4];
#pragma GCC unroll 4
      for (int i = 0; i < (R + 3) / 4; ++i) fours[i] = left + 4 * i * a.row;
#pragma GCC unroll 4
      for (int64_t at = 0; at < kPanel; at += 2, right += pair_stride) {
        Word lanes[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) std::memcpy(&lanes[v], right + 2 * v * W, sizeof(lanes[v]));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          uint32_t pair;
          std::memcpy(&pair, fours[r / 4] + (r & 3) * a.row + at, sizeof(pair));
          const Word x = pair - Word{};
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], lanes[v], x);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + r * c_stride + v * W, acc[r][v]);
  });
}

}  // namespace
}  // namespace flash::cpu
