// cpu/pairs.h: the layouts that products of bf16 matrices read, whose instructions take pairs of numbers along the inner dimension.
#pragma once
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

constexpr int kPanel = 32;  // numbers of the inner dimension that are cut together: 64 bytes, what one instruction of AMX takes

using Word = Types<float>::Unsigned;  // a pair of bf16 numbers per element

constexpr int64_t panels(int64_t count) { return (count + kPanel - 1) / kPanel * kPanel; }

FLASH_INLINE Word load_bits(const BFloat16* p) {
  Types<float>::Half half;
  std::memcpy(&half, p, sizeof(half));
  return __builtin_convertvector(half, Word);
}
FLASH_INLINE void store_word(BFloat16* p, Word x) { std::memcpy(p, &x, sizeof(x)); }

// ---- layouts ------------------------------------------------------------------------------------------------------------------
// A row of pairs has `stride` numbers for every pair of rows of the inner dimension: to[k / 2][column][k % 2].

// Columns are rows of `from`: queries become lanes. to[k / 2][lane][k % 2] = rows[lane][k]; dim is a multiple of 32.
FLASH_STAGE void pair_columns(const BFloat16* const* rows, int64_t dim, int vectors, int64_t stride, BFloat16* to) {
  constexpr int W = kWidth<float>;
  for (int v = 0; v < vectors; ++v, rows += W, to += 2 * W)
    for (int64_t d = 0; d < dim; d += 2 * W) {
      Vector<float> r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) std::memcpy(&r[i], rows[i] + d, sizeof(r[i]));
      transpose<float>(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) std::memcpy(to + (d / 2 + i) * stride, &r[i], sizeof(r[i]));
    }
}

// to[k / 2][d][k % 2] = rows[k][d] for k in [0, count), zero up to `padded` rows, an even number; dim is a multiple of 16.
FLASH_STAGE void pair_rows(const BFloat16* const* rows, int64_t count, int64_t padded, int64_t dim, BFloat16* to) {
  constexpr int W = kWidth<float>;
  for (int64_t k = 0; k < padded; k += 2, to += 2 * dim)
    for (int64_t d = 0; d < dim; d += W) {
      Word x{};
      if (k < count) x = load_bits(rows[k] + d);
      if (k + 1 < count) x |= load_bits(rows[k + 1] + d) << 16;
      store_word(to + 2 * d, x);
    }
}

// to[d][k] = from[k][d] for 32 k and 8 d. Quarters of vectors are loaded where a transpose of 16-byte blocks would put them.
FLASH_INLINE void transpose_block(const BFloat16* from, int64_t stride, BFloat16* to) {
  const auto block = [](const BFloat16* p) FLASH_LAMBDA { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const int64_t quarter = 8 * stride;
  __m512i r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i, from += stride) {
    __m512i x = _mm512_castsi128_si512(block(from));
    x = _mm512_inserti32x4(x, block(from + quarter), 1);
    x = _mm512_inserti32x4(x, block(from + 2 * quarter), 2);
    r[i] = _mm512_inserti32x4(x, block(from + 3 * quarter), 3);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);  // columns 0 to 3 of rows 2i and 2i + 1
    t[i + 4] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      r[half + i] = _mm512_unpacklo_epi32(t[half + 2 * i], t[half + 2 * i + 1]);  // columns 0 and 1 of four rows
      r[half + i + 2] = _mm512_unpackhi_epi32(t[half + 2 * i], t[half + 2 * i + 1]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      _mm512_storeu_si512(to + (i + 2 * j) * kPanel, _mm512_unpacklo_epi64(r[i + 2 * j], r[i + 2 * j + 1]));
      _mm512_storeu_si512(to + (i + 2 * j + 1) * kPanel, _mm512_unpackhi_epi64(r[i + 2 * j], r[i + 2 * j + 1]));
    }
}

// The transpose in tiles of 16 x 32: rows d of `from`'s columns, columns k of its rows [0, count), zero up to the next multiple of 32. A tile
// is contiguous; the next 16 d are `strip` numbers on, the next 32 k `panel` numbers. dim is a multiple of 8.
FLASH_STAGE void transpose_rows(const BFloat16* from, int64_t stride, int64_t count, int64_t dim, BFloat16* to, int64_t strip,
                                int64_t panel) {
  const auto place = [&](int64_t d) { return to + d / 16 * strip + d % 16 * kPanel; };
  for (; count >= kPanel; count -= kPanel, from += kPanel * stride, to += panel)
    for (int64_t d = 0; d < dim; d += 8) transpose_block(from + d, stride, place(d));
  for (int64_t d = 0; count > 0 && d < dim; d += 8) {
    BFloat16 rest[kPanel][8] = {};
    for (int64_t k = 0; k < count; ++k) std::memcpy(rest[k], from + k * stride + d, sizeof(rest[k]));
    transpose_block(rest[0], 8, place(d));
  }
}

// Rows in tiles of 16 x 32, each contiguous, in the order that a product goes through them: to[k / 16][d / 32][k % 16][d % 32], rows zero up
// to the next multiple of 16. dim is a multiple of 32.
FLASH_STAGE void tile_rows(const BFloat16* from, int64_t stride, int64_t count, int64_t dim, BFloat16* to) {
  for (int64_t k = 0; k < count; k += 16)
    for (int64_t d = 0; d < dim; d += kPanel)
      for (int64_t i = k; i < k + 16; ++i, to += kPanel) {
        const __m512i x = i < count ? _mm512_loadu_si512(from + i * stride + d) : _mm512_setzero_si512();
        _mm512_storeu_si512(to, x);
      }
}

// Rows of pairs of the rows of a tile, zero up to the next multiple of 32 rows; `to` may be the tile itself.
FLASH_STAGE void pair_tile(const float* tile, int64_t stride, int64_t rows, int vectors, float* to) {
  constexpr int W = kWidth<float>;
  for (int64_t j = 0; j < panels(rows); j += 2)
    for (int at = 0; at < vectors * W; at += W) {
      const float* from = tile + j * stride + at;
      const Word x = pair(j < rows ? load(from) : Vector<float>{}, j + 1 < rows ? load(from + stride) : Vector<float>{});
      std::memcpy(to + j / 2 * stride + at, &x, sizeof(x));
    }
}

// Rows of `vectors` vectors rounded to bf16.
FLASH_STAGE void round_rows(const float* from, int64_t stride, int64_t rows, int vectors, BFloat16* to, int64_t to_stride) {
  constexpr int W = kWidth<float>;
  for (int64_t j = 0; j < rows; ++j, from += stride, to += to_stride)
    for (int at = 0; at < vectors * W; at += W) {
      const auto half = _mm512_cvtneps_pbh(load(from + at));
      std::memcpy(to + at, &half, sizeof(half));
    }
}

// ---- the left factor of a product --------------------------------------------------------------------------------------------
// A left factor: strips of 16 rows, cut into panels of the inner dimension.
struct Left {
  const BFloat16* data;
  int64_t row, panel, strip;  // strides in numbers
};
inline Left rows_of(const BFloat16* rows, int64_t stride) { return {rows, stride, kPanel, 16 * stride}; }

}  // namespace
}  // namespace flash::cpu
