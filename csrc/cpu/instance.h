// cpu/instance.h: the table of one instruction set, and its passes over whole rows.
#pragma once
#include "cpu/mask_gradient.h"

namespace flash::cpu {
namespace {

template <class Real>
void delta_rows(const Problem& p, const problem::Gradients& g, const problem::Sequence& s, int64_t head, Range rows,
                void* delta) {
  constexpr int W = kWidth<Real>;
  with_real_type<Real>(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = s.row + rows.begin; i < s.row + rows.end; ++i) {
      const T* out = static_cast<const T*>(p.out.data) + problem::offset(p.out, s.batch, head, i);
      const T* dout = static_cast<const T*>(g.dout.data) + problem::offset(g.dout, s.batch, head, i);
      Vector<Real> sums{};
      int64_t d = 0;
      for (; d + W <= p.value_dim; d += W) sums = fma(load<Real>(out + d), load<Real>(dout + d), sums);
      if (d < p.value_dim) {
        const int n = static_cast<int>(p.value_dim - d);
        sums = fma(load_part<Real>(out + d, n), load_part<Real>(dout + d, n), sums);
      }
      Real sum = 0;
      for (int lane = 0; lane < W; ++lane) sum += sums[lane];
      const int64_t at = problem::lse_offset(p, s.batch, head, i);
      static_cast<Real*>(delta)[at] = g.dlse ? sum - static_cast<const Real*>(g.dlse)[at] : sum;
    }
  });
}

template <class Real>
void narrow_rows(const void* from, int64_t from_stride, int64_t count, int64_t dim, DType type, void* to, int64_t to_stride) {
  constexpr int W = kWidth<Real>;
  with_real_type<Real>(type, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = 0; i < count; ++i) {
      const Real* row = static_cast<const Real*>(from) + i * from_stride;
      T* target = static_cast<T*>(to) + i * to_stride;
      int64_t d = 0;
      for (; d + W <= dim; d += W) store(target + d, load(row + d));
      if (d < dim) store_part<Real>(target + d, load_part<Real>(row + d, static_cast<int>(dim - d)), static_cast<int>(dim - d));
    }
  });
}

template <class Real>
constexpr Kernels kernels() {
  return {kWidth<Real>,           kGroup<Real>,        false,           forward_scratch<Real>, forward_task<Real>,
          backward_scratch<Real>, backward_task<Real>, mask_task<Real>, delta_rows<Real>,      narrow_rows<Real>};
}

}  // namespace
}  // namespace flash::cpu
