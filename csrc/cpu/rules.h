// cpu/rules.h: a group of lanes, and what happens to its scores besides scale and softmax.
#pragma once
#include "cpu/tile.h"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/philox.h"
#include "problem/softmax.h"

namespace flash::cpu {
namespace {

using problem::DType;
using problem::Problem;

// Up to kGroup lanes of one sequence and one kv head. A lane is a query row of one of the heads that share the kv head:
// lane index = row * (heads / kv_heads) + head. Lanes past the last repeat it; their results are not used.
template <class Real>
struct Group {
  int lanes, vectors;
  int64_t row_begin, row_end;  // rows that occur
  int64_t row[kGroup<Real>], head[kGroup<Real>];
  Real slope[kGroup<Real>];    // of ALiBi
  int64_t mask[kGroup<Real>];  // offset of the row in the mask
};

// A tile holds query . key times query_factor. The score is `scale` times that, unless `modified`: then adjust() makes it the
// score, and `scale` is 1. `unit` brings what the tile holds to log2 units.
template <class Real>
struct Rules {
  const Problem& p;
  Real query_factor, scale = 1, unit;
  bool modified;
  bool dropped;
  problem::Dropout dropout{};
  Real survivor = 1;  // 1 / (1 - dropout_p)

  explicit Rules(const Problem& problem) : p(problem) {
    const Real whole = static_cast<Real>(p.scale), size = whole < 0 ? -whole : whole;
    modified = p.softcap > 0 || p.alibi_slopes != nullptr || p.mask.data != nullptr;
    if (modified || size < Real(1e-30)) {
      query_factor = p.softcap > 0 ? static_cast<Real>(p.scale / p.softcap) : whole;
    } else {  // the sign goes into the queries: the largest of the tile is then the largest score
      query_factor = whole < 0 ? -1 : 1;
      scale = size;
    }
    unit = scale * problem::Softmax<Real>::kLog2e;
    dropped = p.dropout_p > 0;
    if (dropped) {
      dropout = problem::dropout(p.seed, p.dropout_p);
      survivor = p.dropout_p < 1 ? static_cast<Real>(1 / (1 - p.dropout_p)) : Real(0);
    }
  }
};

template <class Real>
void fill_group(Group<Real>& g, const Problem& p, const problem::Sequence& s, int64_t kv_head, int64_t heads, int64_t begin,
                int64_t end) {
  g.lanes = static_cast<int>(end - begin);
  g.vectors = (g.lanes + kWidth<Real> - 1) / kWidth<Real>;
  g.row_begin = begin / heads;
  g.row_end = (end - 1) / heads + 1;
  int64_t row = begin / heads, head = kv_head * heads + begin % heads;
  for (int i = 0; i < kGroup<Real>; ++i) {
    if (i > 0 && i < g.lanes && ++head == (kv_head + 1) * heads) head -= heads, ++row;
    g.row[i] = row;
    g.head[i] = head;
    g.slope[i] = p.alibi_slopes ? static_cast<const Real*>(p.alibi_slopes)[s.batch * p.alibi_batch + head] : Real(0);
    g.mask[i] = s.batch * p.mask.batch + head * p.mask.head + row * p.mask.row;
  }
}

// Where lanes lie relative to the first key of a tile, as numbers that compare exactly with 0 .. keys - 1.
template <class Real>
struct Bounds {
  Real first[kGroup<Real>], last[kGroup<Real>];  // keys a lane sees: first <= j <= last
  Real diagonal[kGroup<Real>];

  Bounds(const Group<Real>& g, const problem::Interval& interval, int64_t key, int64_t keys) {
    for (int i = 0; i < g.vectors * kWidth<Real>; ++i) {
      const problem::Span span = interval.row(g.row[i]);
      const int64_t low = span.first - key, high = span.last - 1 - key;
      first[i] = static_cast<Real>(low > keys ? keys : low < 0 ? 0 : low);
      last[i] = static_cast<Real>(high > keys ? keys : high < -1 ? -1 : high);
      diagonal[i] = static_cast<Real>(g.row[i] + interval.diagonal - key);
    }
  }
};

// scores() of keys that the earlier rows of a causal group do not see: only for the vectors of lanes in which some row does. What is
// left out is masked later.
template <class Real, int NV>
void edge_scores(const Group<Real>& g, const problem::Interval& interval, int64_t key, int64_t count, const Real* keys,
                 int64_t key_stride, const Real* queries, int64_t dim, Real* tile, int64_t tile_stride) {
  constexpr int W = kWidth<Real>;
  for (int64_t j = 0; j < count; j += W) {
    int first = 0;
    while (first < NV - 1 && interval.row(g.row[(first + 1) * W - 1]).last <= key + j) ++first;
    with_vectors(NV - first, [&](auto vectors) {
      scores<Real, decltype(vectors)::value, false>(keys + j * key_stride, key_stride, queries + first * W, dim,
                                                    tile + j * tile_stride + first * W, tile_stride,
                                                    count - j < W ? count - j : W, nullptr);
    });
  }
}

}  // namespace
}  // namespace flash::cpu
