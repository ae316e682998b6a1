// cpu/tile.h: verbs on tiles of Real numbers. Tiles of scores are transposed: a vector's lanes are queries, rows are keys; so K and V
// are read in their natural layout by scalar broadcasts, and every softmax reduction is vertical.
// Verbs that hold a register tile are functions of their own: inlined into one another they spill.
#pragma once
#include <type_traits>

#include "cpu/exp.h"

#define FLASH_STAGE __attribute__((noinline))

namespace flash::cpu {
namespace {

constexpr int kVectors = 3;  // vectors of lanes in a group: with the rows below, as many accumulators as registers allow
template <class Real>
constexpr int kGroup = kVectors * kWidth<Real>;
constexpr int kRows[] = {0, kRegisters == 32 ? 16 : 8, kRegisters == 32 ? 8 : 4,
                         kRegisters == 32 ? 8 : 4};  // by vectors of lanes

template <int N>
struct Count {
  static constexpr int value = N;
};

// f(Count<vectors>) for vectors in 1 .. kVectors.
template <class F>
FLASH_INLINE void with_vectors(int vectors, const F& f) {
  if (vectors == 1) {
    f(Count<1>{});
  } else if (vectors == 2) {
    f(Count<2>{});
  } else {
    f(Count<3>{});
  }
}

// f(Count<R>, row) over [0, rows) in steps of R, the rest in halves of R.
template <int R, class F>
FLASH_INLINE void by_rows(int64_t row, int64_t rows, const F& f) {
  for (; row + R <= rows; row += R) f(Count<R>{}, row);
  if constexpr (R > 1) {
    if (row < rows) by_rows<R / 2>(row, rows, f);
  }
}

// ---- products -----------------------------------------------------------------------------------------------------------------
// acc[r][lane] = sum over k of a[r][k] * b[k][lane]
template <class Real, int NV, int R>
FLASH_INLINE void product(const Real* a, int64_t lda, const Real* b, int64_t ldb, int64_t k_count, Vector<Real> (&acc)[R][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = Vector<Real>{};
  const Real* fours[(R + 3) / 4];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 3) / 4; ++i) fours[i] = a + 4 * i * lda;
#pragma GCC unroll 4
  for (int64_t k = 0; k < k_count; ++k, b += ldb) {
    Vector<Real> lanes[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) lanes[v] = load(b + v * kWidth<Real>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vector<Real> x = set(fours[r / 4][(r & 3) * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, lanes[v], acc[r][v]);
    }
  }
}

// tile[row][lane] = sum over k of keys[row][k] * queries[k][lane]; kMax: largest[lane] takes in the new scores. kLong: in several running
// sums, as the rounding error of one grows with its length.
template <class Real, int NV, bool kMax, bool kLong>
FLASH_STAGE void scores_of(const Real* keys, int64_t key_stride, const Real* queries, int64_t dim, Real* tile,
                           int64_t tile_stride, int64_t rows, Real* largest) {
  constexpr int64_t kAddends = 64;
  Vector<Real> top[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) top[v] = kMax ? load(largest + v * kWidth<Real>) : Vector<Real>{};
  by_rows<kRows[NV]>(0, rows, [&](auto count, int64_t row) FLASH_LAMBDA {
    constexpr int R = decltype(count)::value;
    Vector<Real> acc[R][NV];
    const Real* a = keys + row * key_stride;
    product<Real, NV, R>(a, key_stride, queries, kGroup<Real>, kLong ? kAddends : dim, acc);
    if constexpr (kLong) {
      for (int64_t k = kAddends; k < dim; k += kAddends) {
        Vector<Real> before[R][NV];
        std::memcpy(before, acc, sizeof(acc));
        product<Real, NV, R>(a + k, key_stride, queries + k * kGroup<Real>, kGroup<Real>,
                             dim - k < kAddends ? dim - k : kAddends, acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] += before[r][v];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        if (kMax) top[v] = max(acc[r][v], top[v]);
        store(tile + (row + r) * tile_stride + v * kWidth<Real>, acc[r][v]);
      }
  });
#pragma GCC unroll 4
  for (int v = 0; kMax && v < NV; ++v) store(largest + v * kWidth<Real>, top[v]);
}
template <class Real, int NV, bool kMax>
FLASH_INLINE void scores(const Real* keys, int64_t key_stride, const Real* queries, int64_t dim, Real* tile,
                         int64_t tile_stride, int64_t rows, Real* largest) {
  if (dim <= 128) {
    scores_of<Real, NV, kMax, false>(keys, key_stride, queries, dim, tile, tile_stride, rows, largest);
  } else {
    scores_of<Real, NV, kMax, true>(keys, key_stride, queries, dim, tile, tile_stride, rows, largest);
  }
}

enum class Into { kReplace, kAdd, kRescale };

// sum[d][lane] = sum[d][lane] * factor[lane] + sum over rows of values[row][d] * tile[row][lane].
// A block is summed by itself and then added: the rounding error grows with the number of blocks, not of keys.
template <class Real, int NV>
FLASH_STAGE void accumulate(const Real* values, int64_t value_stride, const Real* tile, int64_t tile_stride, int64_t rows,
                            Real* sum, int64_t dim, const Real* factor, Into into) {
  by_rows<kRows[NV]>(0, dim, [&](auto count, int64_t d) FLASH_LAMBDA {
    constexpr int R = decltype(count)::value;
    Vector<Real> acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = Vector<Real>{};
    const Real* a = values + d;
    const Real* b = tile;
#pragma GCC unroll 4
    for (int64_t k = 0; k < rows; ++k, a += value_stride, b += tile_stride) {
      Vector<Real> lanes[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) lanes[v] = load(b + v * kWidth<Real>);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vector<Real> x = set(a[r]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, lanes[v], acc[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        Real* to = sum + (d + r) * kGroup<Real> + v * kWidth<Real>;
        Vector<Real> x = acc[r][v];
        if (into == Into::kAdd) x += load(to);
        if (into == Into::kRescale) x = fma(load(to), load(factor + v * kWidth<Real>), x);
        store(to, x);
      }
  });
}

// sum[row][d] += sum over lanes of tile[row][lane] * natural[lane][d]; dim is a multiple of the width.
template <class Real, int NV, int kStart>
FLASH_STAGE void accumulate_columns(const Real* tile, int64_t tile_stride, const Real* natural, int64_t natural_stride,
                                    int64_t lanes, Real* sum, int64_t sum_stride, int64_t rows) {
  by_rows<kStart>(0, rows, [&](auto count, int64_t row) FLASH_LAMBDA {
    constexpr int R = decltype(count)::value;
    Vector<Real> acc[R][NV];
    product<Real, NV, R>(tile + row * tile_stride, tile_stride, natural, natural_stride, lanes, acc);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        Real* to = sum + (row + r) * sum_stride + v * kWidth<Real>;
        store(to, load(to) + acc[r][v]);
      }
  });
}
template <class Real>
inline void accumulate_rows(const Real* tile, int64_t tile_stride, const Real* natural, int64_t natural_stride, int64_t lanes,
                            Real* sum, int64_t sum_stride, int64_t rows, int64_t dim) {
  constexpr int kWide = 2 * kWidth<Real>;
  int64_t d = 0;
  for (; d + kWide <= dim; d += kWide)
    accumulate_columns<Real, 2, kRegisters == 32 ? 8 : 6>(tile, tile_stride, natural + d, natural_stride, lanes, sum + d,
                                                          sum_stride, rows);
  if (d < dim)
    accumulate_columns<Real, 1, kRegisters == 32 ? 16 : 12>(tile, tile_stride, natural + d, natural_stride, lanes, sum + d,
                                                            sum_stride, rows);
}

// ---- moves --------------------------------------------------------------------------------------------------------------------
// r[i][j] <-> r[j][i]: log2(width) rounds of interleaving the first half of the registers with the second.
template <class Real>
FLASH_INLINE void transpose(Vector<Real> (&r)[kWidth<Real>]) {
  constexpr int W = kWidth<Real>;
  using Int = typename Types<Real>::Int;
  Int low, high;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) low[i] = i / 2 + (i & 1) * W, high[i] = W / 2 + i / 2 + (i & 1) * W;
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
    Vector<Real> t[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      t[2 * i] = __builtin_shuffle(r[i], r[i + W / 2], low);
      t[2 * i + 1] = __builtin_shuffle(r[i], r[i + W / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = t[i];
  }
}

// to[d][lane] = rows[lane][from + d] * factor for d in [0, count): `vectors` vectors of lanes, one pointer per lane.
template <class Real, class T>
FLASH_STAGE void pack(const T* const* rows, int64_t from, int64_t count, int vectors, Real factor, Real* to) {
  constexpr int W = kWidth<Real>;
  for (int v = 0; v < vectors; ++v, rows += W, to += W)
    for (int64_t d = 0; d < count; d += W) {
      const int n = static_cast<int>(count - d < W ? count - d : W);
      Vector<Real> r[W];
      if (n == W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = load<Real>(rows[i] + from + d);
      } else {
        for (int i = 0; i < W; ++i) r[i] = load_part<Real>(rows[i] + from + d, n);
      }
      transpose<Real>(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i)
        if (i < n) store(to + (d + i) * kGroup<Real>, r[i] * set(factor));
    }
}

// rows[lane][d] = from[d][lane] * factor[lane] for `lanes` lanes.
template <class Real, class T>
FLASH_STAGE void unpack(const Real* from, int64_t dim, int lanes, const Real* factor, T* const* rows) {
  constexpr int W = kWidth<Real>;
  for (int first = 0; first < lanes; first += W) {
    const int live = lanes - first < W ? lanes - first : W;
    const Vector<Real> f = load(factor + first);
    int64_t d = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>)
      for (; d + 2 * W <= dim; d += 2 * W) {  // two numbers are one element of what is transposed
        Vector<Real> r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          const Real* at = from + (d + 2 * i) * kGroup<Real> + first;
          r[i] = (Vector<Real>)pair(load(at) * f, load(at + kGroup<Real>) * f);
        }
        transpose<Real>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
          if (i < live) std::memcpy(rows[first + i] + d, &r[i], sizeof(r[i]));
      }
#endif
    for (; d < dim; d += W) {
      const int n = static_cast<int>(dim - d < W ? dim - d : W);
      Vector<Real> r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) r[i] = i < n ? load(from + (d + i) * kGroup<Real> + first) * f : Vector<Real>{};
      transpose<Real>(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        if (i >= live) break;
        T* to = rows[first + i] + d;
        if (n == W) {
          store(to, r[i]);
        } else {
          store_part<Real>(to, r[i], n);
        }
      }
    }
  }
}

// One row of dim elements, widened; zeros up to `padded`, a multiple of the width.
template <class Real, class T>
FLASH_INLINE void widen_row(const T* from, int64_t dim, Real* to, int64_t padded) {
  constexpr int W = kWidth<Real>;
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, load<Real>(from + d));
  if (d < dim) store(to + d, load_part<Real>(from + d, static_cast<int>(dim - d))), d += W;
  for (; d < padded; d += W) store(to + d, Vector<Real>{});
}
template <class Real, class T>
FLASH_STAGE void widen_rows(const T* from, int64_t stride, int64_t rows, int64_t dim, Real* to, int64_t padded) {
  for (int64_t i = 0; i < rows; ++i) widen_row(from + i * stride, dim, to + i * padded, padded);
}

}  // namespace
}  // namespace flash::cpu
