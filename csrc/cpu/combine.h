// cpu/combine.h: adds up the partial results of lanes whose keys were cut into parts, in the order of the keys.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/number.h"
#include "problem/softmax.h"

namespace flash::cpu {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lanes whose keys were cut into parts: the first part at `at`.
struct Combination {
  problem::Sequence sequence;
  int64_t kv_head, lane_begin, lane_end;
  int64_t parts, at;
};

// Sum of the parts, in their order.
template <class Real>
void combine(const problem::Problem& p, const Combination& c, const Real* parts) {
  const int64_t heads = p.heads / p.kv_heads, dim = p.value_dim, lanes = c.lane_end - c.lane_begin;
  std::vector<Real> sum(dim);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    problem::Softmax<double> state;
    std::fill(sum.begin(), sum.end(), Real(0));
    for (int64_t i = 0; i < c.parts; ++i) {
      const Real* part = parts + (i * lanes + lane) * (dim + kStatistics);
      const double largest = static_cast<double>(part[dim]) + part[dim + 1], total = part[dim + 2];
      if (total == 0) continue;
      const double shrink = state.fold_max(largest), grow = problem::Softmax<double>::rescale(largest, state.max);
      state.sum += grow * total;
      const Real factor = static_cast<Real>(shrink), weight = static_cast<Real>(grow);
      for (int64_t d = 0; d < dim; ++d) sum[d] = sum[d] * factor + weight * part[d];
    }
    const int64_t row = c.sequence.row + (c.lane_begin + lane) / heads,
                  head = c.kv_head * heads + (c.lane_begin + lane) % heads;
    const double shrink = p.sinks ? state.fold_sink(static_cast<const Real*>(p.sinks)[head]) : 1;
    const Real factor = static_cast<Real>(shrink * state.normaliser());
    with_real_type<Real>(p.dtype, [&](auto tag) {
      auto* out = static_cast<decltype(tag)*>(p.out.data) + problem::offset(p.out, c.sequence.batch, head, row);
      for (int64_t d = 0; d < dim; ++d) narrow(sum[d] * factor, &out[d]);
    });
    if (p.lse) static_cast<Real*>(p.lse)[problem::lse_offset(p, c.sequence.batch, head, row)] = static_cast<Real>(state.lse());
  }
}

}  // namespace
}  // namespace flash::cpu
