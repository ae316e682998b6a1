// cpu/plain.h: attention row by row and key by key, every feature. Memory O(1) per thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/number.h"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/philox.h"
#include "problem/softmax.h"

namespace flash::cpu {
namespace {

using problem::Array;
using problem::DType;
using problem::Gradients;
using problem::Problem;

// T: type of query, key, value, out.
template <class T>
struct Plain {
  using Real = typename Accumulate<T>::type;
  using Softmax = problem::Softmax<Real>;

  const Problem& p;
  const Gradients* g = nullptr;
  Real* delta = nullptr;  // laid out as lse
  problem::Dropout dropout{};

  static const T* at(const Array& a, int64_t b, int64_t h, int64_t i) {
    return static_cast<const T*>(a.data) + problem::offset(a, b, h, i);
  }
  static Real dot(const T* x, const T* y, int64_t n) {
    Real sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += widen(x[d]) * widen(y[d]);
    return sum;
  }

  Real mask_value(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const auto& m = p.mask;
    const int64_t at = b * m.batch + h * m.head + i * m.row + j * m.key;
    if (m.dtype == DType::kBool) return static_cast<const bool*>(m.data)[at] ? Real(0) : -Real(INFINITY);
    Real value = 0;
    with_type(m.dtype, [&](auto tag) { value = static_cast<Real>(widen(static_cast<const decltype(tag)*>(m.data)[at])); });
    return value;
  }

  struct Score {
    Real value;  // natural units, -inf if masked
    Real slope;  // d value / d (query . key)
  };
  Score score(const problem::Sequence& s, const problem::Interval& interval, int64_t h, int64_t i, int64_t j) const {
    const Real masked = -Real(INFINITY);
    if (!interval.sees(i, j)) return {masked, 0};
    const Real bias = p.mask.data ? mask_value(s.batch, h, i, j) : Real(0);
    if (bias == masked) return {masked, 0};
    const Real scale = static_cast<Real>(p.scale), cap = static_cast<Real>(p.softcap);
    Real x = scale * dot(at(p.query, s.batch, h, s.row + i), at(p.key, s.batch, problem::kv_head(p, h), s.key + j), p.head_dim);
    Real slope = scale;
    if (cap > 0) {
      const Real t = std::tanh(x / cap);
      x = cap * t;
      slope *= 1 - t * t;
    }
    if (p.alibi_slopes) {
      const Real alibi = static_cast<const Real*>(p.alibi_slopes)[s.batch * p.alibi_batch + h];
      x -= alibi * static_cast<Real>(std::abs(i + interval.diagonal - j));
    }
    return {x + bias, slope};
  }
  Real kept(const problem::Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (p.dropout_p <= 0) return 1;
    return dropout.keeps(s.batch * p.heads + h, i, j) ? static_cast<Real>(1 / (1 - p.dropout_p)) : Real(0);
  }

  void forward_row(const problem::Sequence& s, int64_t h, int64_t i, std::vector<Real>& sum) const {
    const auto interval = problem::interval(p, s.rows, s.keys);
    const auto span = interval.row(i);
    Softmax state;
    std::fill(sum.begin(), sum.end(), Real(0));
    for (int64_t j = span.first; j < span.last; ++j) {
      const Real x = score(s, interval, h, i, j).value * Softmax::kLog2e;
      const Real factor = state.fold_max(x);
      const Real weight = Softmax::exp2(x - Softmax::reference(state.max));
      state.sum += weight;
      if (factor != 1)
        for (auto& y : sum) y *= factor;
      if (x == -Real(INFINITY)) continue;
      const T* v = at(p.value, s.batch, problem::kv_head(p, h), s.key + j);
      const Real part = weight * kept(s, h, i, j);
      for (int64_t d = 0; d < p.value_dim; ++d) sum[d] += part * widen(v[d]);
    }
    Real factor = 1;
    if (p.sinks) factor = state.fold_sink(static_cast<const Real*>(p.sinks)[h]);
    factor *= state.normaliser();
    T* out = const_cast<T*>(at(p.out, s.batch, h, s.row + i));
    for (int64_t d = 0; d < p.value_dim; ++d) narrow(sum[d] * factor, &out[d]);
    if (p.lse) static_cast<Real*>(p.lse)[problem::lse_offset(p, s.batch, h, s.row + i)] = state.lse();
  }

  void delta_row(const problem::Sequence& s, int64_t h, int64_t i) const {
    const int64_t at_lse = problem::lse_offset(p, s.batch, h, s.row + i);
    Real sum = dot(at(p.out, s.batch, h, s.row + i), at(g->dout, s.batch, h, s.row + i), p.value_dim);
    if (g->dlse) sum -= static_cast<const Real*>(g->dlse)[at_lse];
    delta[at_lse] = sum;
  }

  struct Probability {
    Real kept;   // after dropout: what multiplies V
    Real slope;  // gradient of the score
    Real chain;  // d score / d (query . key)
  };
  Probability probability(const problem::Sequence& s, const problem::Interval& interval, int64_t h, int64_t i, int64_t j) const {
    const auto x = score(s, interval, h, i, j);
    if (x.value == -Real(INFINITY)) return {0, 0, 0};
    const int64_t at_lse = problem::lse_offset(p, s.batch, h, s.row + i);
    const Real weight = Softmax::exp2(x.value * Softmax::kLog2e - Softmax::lse2(static_cast<const Real*>(p.lse)[at_lse]));
    const Real keep = kept(s, h, i, j);
    const Real dp = dot(at(g->dout, s.batch, h, s.row + i), at(p.value, s.batch, problem::kv_head(p, h), s.key + j), p.value_dim);
    return {weight * keep, weight * (dp * keep - delta[at_lse]), x.slope};
  }

  void query_row(const problem::Sequence& s, int64_t h, int64_t i, std::vector<Real>& sum) const {
    const auto interval = problem::interval(p, s.rows, s.keys);
    const auto span = interval.row(i);
    std::fill(sum.begin(), sum.end(), Real(0));
    for (int64_t j = span.first; j < span.last; ++j) {
      const auto x = probability(s, interval, h, i, j);
      if (x.slope == 0) continue;
      const T* k = at(p.key, s.batch, problem::kv_head(p, h), s.key + j);
      for (int64_t d = 0; d < p.head_dim; ++d) sum[d] += x.slope * x.chain * widen(k[d]);
    }
    T* to = const_cast<T*>(at(g->dquery, s.batch, h, s.row + i));
    for (int64_t d = 0; d < p.head_dim; ++d) narrow(sum[d], &to[d]);
  }

  void key_row(const problem::Sequence& s, int64_t kv, int64_t j, std::vector<Real>& dk, std::vector<Real>& dv) const {
    const auto interval = problem::interval(p, s.rows, s.keys);
    const auto span = interval.viewers(j, j + 1, s.rows);
    const int64_t group = p.heads / p.kv_heads;
    std::fill(dk.begin(), dk.end(), Real(0));
    std::fill(dv.begin(), dv.end(), Real(0));
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
      for (int64_t i = span.first; i < span.last; ++i) {
        const auto x = probability(s, interval, h, i, j);
        const T* q = at(p.query, s.batch, h, s.row + i);
        const T* dout = at(g->dout, s.batch, h, s.row + i);
        if (x.slope != 0)
          for (int64_t d = 0; d < p.head_dim; ++d) dk[d] += x.slope * x.chain * widen(q[d]);
        if (x.kept != 0)
          for (int64_t d = 0; d < p.value_dim; ++d) dv[d] += x.kept * widen(dout[d]);
      }
    T* to_key = const_cast<T*>(at(g->dkey, s.batch, kv, s.key + j));
    T* to_value = const_cast<T*>(at(g->dvalue, s.batch, kv, s.key + j));
    if (g->dkey.data)
      for (int64_t d = 0; d < p.head_dim; ++d) narrow(dk[d], &to_key[d]);
    if (g->dvalue.data)
      for (int64_t d = 0; d < p.value_dim; ++d) narrow(dv[d], &to_value[d]);
  }

  // One element of dmask: sums over the dimensions in which the mask is broadcast.
  Real mask_element(int64_t b0, int64_t h0, int64_t i0, int64_t j0) const {
    Real sum = 0;
    for (int64_t b = b0; b < (g->dmask_batch ? b0 + 1 : p.batch); ++b)
      for (int64_t h = h0; h < (g->dmask_head ? h0 + 1 : p.heads); ++h) {
        const auto s = problem::sequence(p, b);
        const auto interval = problem::interval(p, s.rows, s.keys);
        for (int64_t i = i0; i < (g->dmask_row ? i0 + 1 : p.rows); ++i)
          for (int64_t j = j0; j < (g->dmask_key ? j0 + 1 : p.keys); ++j) sum += probability(s, interval, h, i, j).slope;
      }
    return sum;
  }
};

}  // namespace
}  // namespace flash::cpu
