// common/single_score.cuh: what acts on a single score, for the kernels by plain arithmetic. The mask, which each of them reads in types of
// its own, comes after it.
#pragma once
#include "problem/problem.h"

namespace flash::common {

template <class Real>
struct SingleScore {
  Real score, slope;  // in natural units; its derivative by scale q.k
};

// dot: q.k; row: on the axis of keys, that is with the diagonal added.
template <class Real>
__device__ __forceinline__ SingleScore<Real> single_score(const problem::Problem& p, int64_t batch, int64_t head, int64_t row,
                                                          int64_t key, Real dot) {
  SingleScore<Real> x{dot * Real(p.scale), 1};
  if (p.softcap > 0) {
    const Real capped = tanh(x.score / Real(p.softcap));
    x = {capped * Real(p.softcap), 1 - capped * capped};
  }
  if (p.alibi_slopes != nullptr) {
    const int64_t distance = row - key;
    x.score -=
        static_cast<const Real*>(p.alibi_slopes)[batch * p.alibi_batch + head] * Real(distance < 0 ? -distance : distance);
  }
  return x;
}

}  // namespace flash::common
