// cpu/amx.h: products of bf16 matrices on the tile registers of AMX, and the layouts they read. A register holds 16 rows of 64 bytes;
// one instruction adds the product of 16 rows of 32 numbers with 16 rows of 16 pairs to 16 x 16 sums in fp32.
#pragma once
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

constexpr int kPanel = 32;  // numbers of the inner dimension that one instruction takes: 64 bytes

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

// ---- the product ----------------------------------------------------------------------------------------------------------------
// What a tile register is set to hold.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit constexpr TileConfig(
      int height) {  // registers 0 to 5 hold sums and 6 a left factor of `height` rows, 7 a right factor
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = static_cast<uint8_t>(i < 7 ? height : 16);
  }
};

FLASH_INLINE void set_registers(const TileConfig& config) {
  __asm__ volatile("" : : "r"(&config) : "memory");  // compilers believe that the instruction reads 8 bytes
  _tile_loadconfig(&config);
}

// A left factor: strips of 16 rows, cut into panels of the inner dimension.
struct Left {
  const BFloat16* data;
  int64_t row, panel, strip;  // strides in numbers
};
inline Left rows_of(const BFloat16* rows, int64_t stride) { return {rows, stride, kPanel, 16 * stride}; }

// One function, one instruction. The registers are literals in the text, as intrinsics have them; memory is what loads depend on.
template <int R>
FLASH_INLINE void zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(R));
}
template <int R>
FLASH_INLINE void load(const void* p, int64_t bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(bytes), "i"(R) : "memory");
}
template <int R>
FLASH_INLINE void store(float* p, int64_t bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(bytes), "i"(R) : "memory");
}
template <int Sum, int A, int B>
FLASH_INLINE void dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
}

template <int V, int R>
FLASH_INLINE void store_strip(float* c, int64_t c_bytes) {
  constexpr int W = kWidth<float>;
  store<R>(c, c_bytes);
  if constexpr (V > 1) store<R + 1>(c + W, c_bytes);
  if constexpr (V > 2) store<R + 2>(c + 2 * W, c_bytes);
}

// Sums of a strip of rows (as many as the registers are set to) and V vectors of columns over `inner` numbers, left in registers R to
// R + V - 1. Between early products, the strip before, which is in the other three, goes to `before` (or null): a store
// takes as long as a product and waits for its sums.
template <int V, int R, bool kAdd>
FLASH_INLINE void multiply_strip(Left a, const BFloat16* b, int64_t pair_stride, int64_t inner, const float* c,
                                 int64_t c_stride, float* before) {
  constexpr int W = kWidth<float>, kOther = 3 - R;
  const int64_t c_bytes = c_stride * 4, a_bytes = a.row * 2, b_bytes = pair_stride * 2;
  if constexpr (kAdd) {
    load<R>(c, c_bytes);
    if constexpr (V > 1) load<R + 1>(c + W, c_bytes);
    if constexpr (V > 2) load<R + 2>(c + 2 * W, c_bytes);
  } else {
    zero<R>();
    if constexpr (V > 1) zero<R + 1>();
    if constexpr (V > 2) zero<R + 2>();
  }
  const auto step = [&](float* to) FLASH_LAMBDA {
    load<6>(a.data, a_bytes);
    load<7>(b, b_bytes);
    dot<R, 6, 7>();
    if (to) store<kOther>(to, c_bytes);
    if constexpr (V > 1) {
      load<7>(b + 2 * W, b_bytes);
      dot<R + 1, 6, 7>();
      if (to) store<kOther + 1>(to + W, c_bytes);
    }
    if constexpr (V > 2) {
      load<7>(b + 4 * W, b_bytes);
      dot<R + 2, 6, 7>();
      if (to) store<kOther + 2>(to + 2 * W, c_bytes);
    }
    a.data += a.panel;
    b += kPanel / 2 * pair_stride;
  };
  const int64_t late = inner > kPanel ? kPanel : 0;  // sums are there some 50 cycles after the last product
  for (int64_t k = 0; k < inner; k += kPanel) step(k == late ? before : nullptr);
}

// Registers of 16 rows, which every product finds and leaves.
FLASH_INLINE void set_whole_registers() {
  static constexpr TileConfig kWhole(16);
  set_registers(kWhole);
}

// c[row][column] = (kAdd: what is there +) sum over k of a[row][k] * b[k / 2][column][k % 2], for V vectors of columns.
template <int V, bool kAdd>
FLASH_STAGE void multiply(Left a, const BFloat16* b, int64_t pair_stride, int64_t inner, float* c, int64_t c_stride,
                          int64_t rows) {
  const int64_t c_bytes = c_stride * 4;
  float* before = nullptr;
  const auto strip = [&](auto first, int64_t row, float* to) FLASH_LAMBDA {
    multiply_strip<V, decltype(first)::value, kAdd>({a.data + row / 16 * a.strip, a.row, a.panel, a.strip}, b, pair_stride,
                                                    inner, c + row * c_stride, c_stride, to);
  };
  int64_t row = 0;
  for (; row + 32 <= rows; row += 32) {
    strip(Count<0>{}, row, before);
    before = c + (row + 16) * c_stride;
    strip(Count<3>{}, row + 16, c + row * c_stride);
  }
  if (row + 16 <= rows) {
    strip(Count<0>{}, row, before);
    store_strip<V, 0>(c + row * c_stride, c_bytes);
    row += 16;
  } else if (before) {
    store_strip<V, 3>(before, c_bytes);
  }
  if (row < rows) {
    const TileConfig rest(static_cast<int>(rows - row));
    set_registers(rest);
    strip(Count<0>{}, row, nullptr);
    store_strip<V, 0>(c + row * c_stride, c_bytes);
    set_whole_registers();
  }
}

}  // namespace
}  // namespace flash::cpu
