// cpu/amx.h: the product of bf16 matrices on the tile registers of AMX. A register holds 16 rows of 64 bytes; one instruction adds the
// product of 16 rows of 32 numbers with 16 rows of 16 pairs to 16 x 16 sums in fp32.
#pragma once
#include "cpu/pairs.h"

namespace flash::cpu {
namespace {

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

// Around products: registers of 16 rows, which every product finds and leaves.
FLASH_INLINE void begin_products() {
  static constexpr TileConfig kWhole(16);
  set_registers(kWhole);
}
FLASH_INLINE void end_products() { _tile_release(); }

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
    begin_products();
  }
}

}  // namespace
}  // namespace flash::cpu
