// cpu/few.h: the two products for one or a few query rows, bound by the memory that K and V come from. Vector lanes run along
// head_dim, so a row of K or V is read once, densely, and widened in registers. The tile of scores is that of score.h.
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

// tile[key][lane] = keys[key] . queries[lane]
template <class Real, class T>
FLASH_STAGE void few_scores(const T* keys, int64_t key_stride, int64_t count, int64_t dim, const Real* queries,
                            int64_t query_stride, int lanes, Real* tile) {
  constexpr int W = kWidth<Real>;
  for (int64_t j = 0; j < count; j += W) {
    const T* rows[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = keys + (j + i < count ? j + i : count - 1) * key_stride;
    for (int lane = 0; lane < lanes; ++lane) {
      const Real* q = queries + lane * query_stride;
      Vector<Real> acc[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {  // row after row, which is the order that caches look ahead in
        Vector<Real> sum[2] = {};
        int64_t d = 0;
        for (; d + 2 * W <= dim; d += 2 * W) {
          sum[0] = fma(load<Real>(rows[i] + d), load(q + d), sum[0]);
          sum[1] = fma(load<Real>(rows[i] + d + W), load(q + d + W), sum[1]);
        }
        for (; d + W <= dim; d += W) sum[0] = fma(load<Real>(rows[i] + d), load(q + d), sum[0]);
        if (d < dim) sum[0] = fma(load_part<Real>(rows[i] + d, static_cast<int>(dim - d)), load(q + d), sum[0]);
        acc[i] = sum[0] + sum[1];
      }
      transpose<Real>(acc);
#pragma GCC unroll 4
      for (int half = W / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) acc[i] += acc[i + half];
      Real sum[W];
      store(sum, acc[0]);
      for (int i = 0; i < W && j + i < count; ++i) tile[(j + i) * kGroup<Real> + lane] = sum[i];
    }
  }
}

// sum[lane][d] = sum[lane][d] * factor[lane] + sum over keys of values[key][d] * tile[key][lane]
template <class Real, class T>
FLASH_STAGE void few_accumulate(const T* values, int64_t value_stride, int64_t count, int64_t dim, const Real* tile, int lanes,
                                const Real* factor, bool first, Real* sum, int64_t sum_stride) {
  constexpr int W = kWidth<Real>, kChunk = 8;
  const auto chunk = [&](auto vectors, int64_t d, int lane) FLASH_LAMBDA {
    constexpr int N = decltype(vectors)::value;
    const int part = static_cast<int>(dim - d < W ? dim - d : W);
    Vector<Real> acc[N] = {};
    for (int64_t j = 0; j < count; ++j) {
      const Vector<Real> p = set(tile[j * kGroup<Real> + lane]);
      const T* v = values + j * value_stride + d;
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
        acc[i] = fma(p, N > 1 || part == W ? load<Real>(v + i * W) : load_part<Real>(v, part), acc[i]);
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
