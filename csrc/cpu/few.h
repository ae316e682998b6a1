// cpu/few.h: the two products for one or a few query rows, bound by the memory that K and V come from. Vector lanes run along
// head_dim, so a row of K or V is read once, densely, and widened in registers.
#pragma once
#include "cpu/tile.h"

namespace flash::cpu {
namespace {

constexpr int kFew = 4;  // from 5 rows on, lanes = queries costs less

template <class Real, class T>
void few_query(const T* from, int64_t dim, Real factor, Real* to) {
  constexpr int W = kWidth<Real>;
  for (int64_t d = 0; d < dim; d += W) {
    const Vector<Real> x = d + W <= dim ? load<Real>(from + d) : load_part<Real>(from + d, static_cast<int>(dim - d));
    store(to + d, x * set(factor));
  }
}

// A tile of scores: that of key j and lane i is at [j * key + i * lane].
struct Strides {
  int64_t key, lane;
};

// acc[i] takes in the products of N vectors of row i, for R rows.
template <class Real, int R, int N, class T>
FLASH_INLINE void few_products(const T* rows, int64_t stride, const Real* query, Vector<Real> (&acc)[R]) {
  Vector<Real> q[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) q[n] = load(query + n * kWidth<Real>);
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[i] = fma(load<Real>(rows + i * stride + n * kWidth<Real>), q[n], acc[i]);
}

// Scores of `count` keys; where they follow each other, -inf up to a multiple of the width.
template <class Real, class T>
FLASH_STAGE void few_scores(const T* keys, int64_t key_stride, int64_t count, int64_t dim, const Real* queries,
                            int64_t query_stride, int lanes, Real* tile, Strides at) {
  constexpr int W = kWidth<Real>, kChunk = kRegisters == 32 ? 8 : 4;
  by_rows<8>(0, count, [&](auto rows, int64_t j) FLASH_LAMBDA {
    constexpr int R = decltype(rows)::value;
    const T* row = keys + j * key_stride;
    for (int lane = 0; lane < lanes; ++lane) {
      const Real* q = queries + lane * query_stride;
      Vector<Real> acc[R] = {};
      int64_t d = 0;
      for (; d + kChunk * W <= dim; d += kChunk * W) few_products<Real, R, kChunk>(row + d, key_stride, q + d, acc);
      for (; d + W <= dim; d += W) few_products<Real, R, 1>(row + d, key_stride, q + d, acc);
      if (d < dim)
        for (int i = 0; i < R; ++i)
          acc[i] = fma(load_part<Real>(row + i * key_stride + d, static_cast<int>(dim - d)), load(q + d), acc[i]);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) tile[(j + i) * at.key + lane * at.lane] = sum_of(acc[i]);
    }
  });
  for (int64_t j = count; at.key == 1 && j % W != 0; ++j)
    for (int lane = 0; lane < lanes; ++lane) tile[j + lane * at.lane] = -std::numeric_limits<Real>::infinity();
}

// exponentiate() of score.h for one lane whose scores follow each other.
template <class Real>
FLASH_STAGE void few_exponentiate(Real unit, Real* scores, int64_t keys, Real* largest, Real* total, Real* factor) {
  constexpr int W = kWidth<Real>;
  constexpr Real kNone = -std::numeric_limits<Real>::infinity();
  const Vector<Real> c = set(unit);
  Vector<Real> tops = set(*largest), sums{};
  for (int64_t j = 0; j < keys; j += W) tops = max(load(scores + j), tops);
  Real top = *largest;
  for (int i = 0; i < W; ++i) top = tops[i] > top ? tops[i] : top;
  const Vector<Real> reference = set(top == kNone ? Real(0) : top);  // Softmax::reference
  const Vector<Real> shrink = exp2<Real>(set(*largest) - reference, c);
  *factor = top == *largest ? Real(1) : shrink[0];
  *largest = top;
  for (int64_t j = 0; j < keys; j += W) {
    const Vector<Real> x = exp2<Real>(load(scores + j) - reference, c);
    store(scores + j, x);
    sums += x;
  }
  *total = *total * *factor + sum_of(sums);
}

// sum[lane][d] = sum[lane][d] * factor[lane] + sum over keys of values[key][d] * tile[key, lane]
template <class Real, class T>
FLASH_STAGE void few_accumulate(const T* values, int64_t value_stride, int64_t count, int64_t dim, const Real* tile, Strides at,
                                int lanes, const Real* factor, bool first, Real* sum, int64_t sum_stride) {
  constexpr int W = kWidth<Real>, kChunk = 8;
  const auto chunk = [&](auto vectors, int64_t d, int lane) FLASH_LAMBDA {
    constexpr int N = decltype(vectors)::value;
    const int part = static_cast<int>(dim - d < W ? dim - d : W);
    Vector<Real> acc[N] = {};
    const Real* p = tile + lane * at.lane;
    const T* v = values + d;
    for (int64_t j = 0; j < count; ++j, p += at.key, v += value_stride) {
      const Vector<Real> x = set(*p);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
        acc[i] = fma(x, N > 1 || part == W ? load<Real>(v + i * W) : load_part<Real>(v, part), acc[i]);
    }
    Real* to = sum + lane * sum_stride + d;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) store(to + i * W, first ? acc[i] : fma(load(to + i * W), set(factor[lane]), acc[i]));
  };
  for (int lane = 0; lane < lanes; ++lane) {
    int64_t d = 0;
    for (; d + kChunk * W <= dim; d += kChunk * W) chunk(Count<kChunk>{}, d, lane);
    for (; d < dim; d += W) chunk(Count<1>{}, d, lane);
  }
}

template <class Real, class T>
void few_store(const Real* from, int64_t stride, int64_t dim, int lanes, const Real* factor, T* const* rows) {
  constexpr int W = kWidth<Real>;
  for (int lane = 0; lane < lanes; ++lane)
    for (int64_t d = 0; d < dim; d += W) {
      const Vector<Real> x = load(from + lane * stride + d) * set(factor[lane]);
      if (d + W <= dim) {
        store(rows[lane] + d, x);
      } else {
        store_part<Real>(rows[lane] + d, x, static_cast<int>(dim - d));
      }
    }
}

}  // namespace
}  // namespace flash::cpu
