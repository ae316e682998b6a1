// cpu/backward.h: gradients of a block of lanes with respect to queries, keys and values, from out and lse alone. Five products:
// scores and dP again, then dQ += dS K, dV += P^T dO, dK += dS^T Q; the last two sum over the lanes of the whole block.
#pragma once
#include "cpu/forward.h"

namespace flash::cpu {
namespace {

template <class Real>
struct BackwardScratch {
  Group<Real>* groups;                    // [groups]
  Real *queries, *douts, *dqueries;       // [groups][dim] rows of kGroup lanes
  Real *natural_queries, *natural_douts;  // [lanes][dim]
  Real *lse, *delta;                      // [groups][kGroup]
  Real *tile, *gradient;                  // [keys][stride]: P and dS of all lanes
  Real *bias, *keep, *slope;              // [keys][kGroup]
  Real *keys, *values;                    // [keys][dim], widened
  Real* mask;                             // [kMaskTiles * keys][kGroup]
  bool* started;                          // [groups]: dqueries hold something
  int64_t stride;

  BackwardScratch(Arena& arena, const Problem& p, const Tiling& tiling) {
    const int64_t count = tiling.lanes / kGroup<Real>, dim = spaced<Real>(p.head_dim), value_dim = spaced<Real>(p.value_dim);
    const bool widened = size_of(p.dtype) != sizeof(Real);
    stride = tiling.lanes + kWidth<Real>;  // rows of a power of two would share few cache sets
    groups = arena.take<Group<Real>>(count);
    queries = arena.take<Real>(tiling.lanes * dim);
    douts = arena.take<Real>(tiling.lanes * value_dim);
    dqueries = arena.take<Real>(tiling.lanes * dim);
    natural_queries = arena.take<Real>(tiling.lanes * dim);
    natural_douts = arena.take<Real>(tiling.lanes * value_dim);
    lse = arena.take<Real>(tiling.lanes);
    delta = arena.take<Real>(tiling.lanes);
    tile = arena.take<Real>(tiling.keys * stride);
    gradient = arena.take<Real>(tiling.keys * stride);
    bias = arena.take<Real>(p.mask.data ? tiling.keys * kGroup<Real> : 0);
    keep = arena.take<Real>(p.dropout_p > 0 ? tiling.keys * kGroup<Real> : 0);
    slope = arena.take<Real>(p.softcap > 0 ? tiling.keys * kGroup<Real> : 0);
    keys = arena.take<Real>(widened ? tiling.keys * dim : 0);
    values = arena.take<Real>(widened ? tiling.keys * value_dim : 0);
    mask = arena.take<Real>(p.mask.data ? kMaskTiles * tiling.keys * kGroup<Real> : 0);
    started = arena.take<bool>(count);
  }
};

// P and dS of one group of lanes and a few keys.
template <class Real>
class Differentiator {
 public:
  Differentiator(const Problem& p, const problem::Sequence& s, const Tiling& tiling, void* memory)
      : p_(p),
        s_(s),
        tiling_(tiling),
        rules_(p),
        interval_(problem::interval(p, s.rows, s.keys)),
        arena_{reinterpret_cast<uintptr_t>(memory)},
        scratch_(arena_, p, tiling) {}

 protected:
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

  Real* queries(int i) { return scratch_.queries + i * kGroup<Real> * p_.head_dim; }
  Real* douts(int i) { return scratch_.douts + i * kGroup<Real> * p_.value_dim; }

  // lse and delta of a group; dS comes out times `scale`, as dO^T was packed with it.
  void load_statistics(int i, Real scale, const Real* delta) {
    const Group<Real>& g = scratch_.groups[i];
    for (int lane = 0; lane < kGroup<Real>; ++lane) {
      const int64_t at = problem::lse_offset(p_, s_.batch, g.head[lane], s_.row + g.row[lane]);
      const Real lse = static_cast<const Real*>(p_.lse)[at];
      scratch_.lse[i * kGroup<Real> + lane] = lse == -std::numeric_limits<Real>::infinity() ? -lse : lse;  // as Softmax::lse2
      scratch_.delta[i * kGroup<Real> + lane] = scale * delta[at];
    }
  }

  // Keys [from, to) into tile and gradient, whose row 0 is key `from`.
  template <int NV>
  void step(int i, int64_t from, int64_t to, Rows<Real> keys, Rows<Real> values, Real* tile, Real* gradient, int64_t stride,
            bool chain) {
    const Group<Real>& g = scratch_.groups[i];
    const int64_t edge = least(most(interval_.common(g.row_begin, g.row_end).last, from), to), count = edge - from;
    scores<Real, NV, false>(keys.data, keys.stride, queries(i), p_.head_dim, tile, stride, count, nullptr);
    scores<Real, NV, false>(values.data, values.stride, douts(i), p_.value_dim, gradient, stride, count, nullptr);
    edge_scores<Real, NV>(g, interval_, edge, to - edge, keys.data + count * keys.stride, keys.stride, queries(i), p_.head_dim,
                          tile + count * stride, stride);
    edge_scores<Real, NV>(g, interval_, edge, to - edge, values.data + count * values.stride, values.stride, douts(i),
                          p_.value_dim, gradient + count * stride, stride);
    weigh<NV>(i, from, to, tile, gradient, stride, 1, chain);
  }

  // The same from query . key times query_factor and dO . value over gradient_scale.
  template <int NV>
  void weigh(int i, int64_t from, int64_t to, Real* tile, Real* gradient, int64_t stride, Real gradient_scale, bool chain) {
    const Group<Real>& g = scratch_.groups[i];
    const Real *lse = scratch_.lse + i * kGroup<Real>, *delta = scratch_.delta + i * kGroup<Real>;
    const problem::Span all = interval_.common(g.row_begin, g.row_end);
    const auto careful = [&](int64_t begin, int64_t end) {
      if (begin >= end) return;
      if (p_.mask.data) mask_tile(p_, g, begin, end - begin, scratch_.bias);
      if (rules_.dropped) dropout_tile(rules_, g, s_.batch, begin, end - begin, scratch_.keep);
      Real *p = tile + (begin - from) * stride, *ds = gradient + (begin - from) * stride;
      adjust<Real>(rules_, g, Bounds<Real>(g, interval_, begin, end - begin), p_.mask.data ? scratch_.bias : nullptr,
                   begin < all.first || end > all.last, end - begin, p, stride, scratch_.slope);
      differentiate<Real, NV, false>(rules_.scale, gradient_scale, end - begin, p, ds, stride, lse, delta,
                                     rules_.dropped ? scratch_.keep : nullptr,
                                     chain && p_.softcap > 0 ? scratch_.slope : nullptr);
    };
    if (rules_.modified || rules_.dropped) return careful(from, to);
    const int64_t full = least(most(all.first, from), to), full_end = most(least(all.last, to), full);
    careful(from, full);
    if (full < full_end)
      differentiate<Real, NV, true>(rules_.scale, gradient_scale, full_end - full, tile + (full - from) * stride,
                                    gradient + (full - from) * stride, stride, lse, delta, nullptr, nullptr);
    careful(full_end, to);
  }

  const Problem& p_;
  const problem::Sequence& s_;
  const Tiling& tiling_;
  const Rules<Real> rules_;
  const problem::Interval interval_;
  Arena arena_;
  BackwardScratch<Real> scratch_;
};

template <class Real>
class Backward : protected Differentiator<Real> {
 protected:
  using Base = Differentiator<Real>;
  using Base::p_, Base::s_, Base::tiling_, Base::rules_, Base::interval_, Base::scratch_, Base::least, Base::most;

 public:
  Backward(const BackwardTask& task, const Tiling& tiling, void* memory)
      : Base(*task.problem, task.sequence, tiling, memory), task_(task), heads_(p_.heads / p_.kv_heads) {}
  virtual ~Backward() = default;

  void run() {
    const int64_t begin = task_.rows.begin * heads_, end = task_.rows.end * heads_, step = tiling_.lanes;
    for (int64_t lane = begin + (end - begin + step - 1) / step * step - step; lane >= begin; lane -= step)
      lanes(lane, least(lane + step, end));
  }

 protected:
  void lanes(int64_t begin, int64_t end) {
    lanes_ = end - begin;
    count_ = 0;
    const problem::Span seen = interval_.rows(begin / heads_, (end - 1) / heads_ + 1);
    const int64_t first = most(seen.first, task_.keys.begin), last = least(seen.last, task_.keys.end);
    if (first >= last && task_.keys.begin > 0) return;  // from key 0 on there may be zeros to write
    for (int64_t lane = begin; lane < end; lane += kGroup<Real>, ++count_) {
      fill_group(scratch_.groups[count_], p_, s_, task_.kv_head, heads_, lane, least(lane + kGroup<Real>, end));
      this->load_statistics(count_, static_cast<Real>(p_.scale), static_cast<const Real*>(task_.delta));
      load_sums(count_);
    }
    load();
    first_lane_ = begin;
    for (int64_t key = first; key < last;) {  // tiles end where those of the whole head end
      const int64_t next = least((key / tiling_.keys + 1) * tiling_.keys, last);
      block(key, next);
      key = next;
    }
    if (task_.gradients->dquery.data)
      with_real_type<Real>(p_.dtype, [&](auto tag) {
        for (int i = 0; i < count_; ++i) store_queries<decltype(tag)>(i);
      });
  }

  // Query and dO, natural for the sums over lanes and packed for the sums over dims.
  virtual void load() {
    with_real_type<Real>(p_.dtype, [&](auto tag) { load_rows<decltype(tag)>(); });
  }
  template <class T>
  void load_rows() {
    const int64_t dim = spaced<Real>(p_.head_dim), value_dim = spaced<Real>(p_.value_dim);
    for (int i = 0; i < count_; ++i) {
      const Group<Real>& g = scratch_.groups[i];
      T *query[kGroup<Real>], *dout[kGroup<Real>];
      lane_rows(g, p_.query, s_, query);
      lane_rows(g, task_.gradients->dout, s_, dout);
      const Real *natural_query[kGroup<Real>], *natural_dout[kGroup<Real>];
      for (int lane = 0; lane < kGroup<Real>; ++lane) {
        const int64_t at = i * kGroup<Real> + (lane < g.lanes ? lane : g.lanes - 1);
        if (lane < g.lanes) {
          widen_row(query[lane], p_.head_dim, scratch_.natural_queries + at * dim, padded<Real>(p_.head_dim));
          widen_row(dout[lane], p_.value_dim, scratch_.natural_douts + at * value_dim, padded<Real>(p_.value_dim));
        }
        natural_query[lane] = scratch_.natural_queries + at * dim;
        natural_dout[lane] = scratch_.natural_douts + at * value_dim;
      }
      pack<Real, Real>(natural_query, 0, p_.head_dim, g.vectors, rules_.query_factor, this->queries(i));
      pack<Real, Real>(natural_dout, 0, p_.value_dim, g.vectors, static_cast<Real>(p_.scale), this->douts(i));
    }
  }

  // dQ of the keys that came before this task's.
  void load_sums(int i) {
    const Group<Real>& g = scratch_.groups[i];
    const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
    scratch_.started[i] = seen.first < least(seen.last, task_.keys.begin);
    if (!task_.dquery || !scratch_.started[i]) return;
    Real* rows[kGroup<Real>];
    sum_rows(g, rows);
    pack<Real, Real>(rows, 0, p_.head_dim, g.vectors, Real(1), dqueries(i));
  }
  void sum_rows(const Group<Real>& g, Real** rows) const {
    for (int i = 0; i < kGroup<Real>; ++i)
      rows[i] = static_cast<Real*>(task_.dquery) + g.head[i] * task_.dquery_head + g.row[i] * task_.dquery_row;
  }

  Real* dqueries(int i) { return scratch_.dqueries + i * kGroup<Real> * p_.head_dim; }

  virtual void block(int64_t begin, int64_t end) {
    const int64_t count = end - begin, stride = scratch_.stride;
    const Rows<Real> keys =
        real_rows(p_.dtype, p_.key, s_.batch, task_.kv_head, s_.key + begin, count, p_.head_dim, scratch_.keys);
    const Rows<Real> values =
        real_rows(p_.dtype, p_.value, s_.batch, task_.kv_head, s_.key + begin, count, p_.value_dim, scratch_.values);
    for (int i = 0; i < count_; ++i) {
      const Group<Real>& g = scratch_.groups[i];
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t from = least(most(seen.first, begin), end), to = most(least(seen.last, end), from);
      Real *tile = scratch_.tile + i * kGroup<Real>, *gradient = scratch_.gradient + i * kGroup<Real>;
      clear(tile, gradient, 0, from - begin);
      clear(tile, gradient, to - begin, count);
      if (from == to) continue;
      const int64_t skip = from - begin;
      with_vectors(g.vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        this->template step<NV>(i, from, to, {keys.data + skip * keys.stride, keys.stride},
                                {values.data + skip * values.stride, values.stride}, tile + skip * stride,
                                gradient + skip * stride, stride, true);
        if (task_.gradients->dquery.data)
          accumulate<Real, NV>(keys.data + skip * keys.stride, keys.stride, gradient + skip * stride, stride, to - from,
                               dqueries(i), p_.head_dim, nullptr, scratch_.started[i] ? Into::kAdd : Into::kReplace);
      });
      scratch_.started[i] = true;
    }
    if (task_.dkey || task_.dvalue)
      each_strip<12>(begin, end, [&](int64_t first, int64_t last, Range seen) { sum_strip(begin, first, last, seen); });
  }

  void clear(Real* tile, Real* gradient, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      std::memset(tile + j * scratch_.stride, 0, sizeof(Real) * kGroup<Real>);
      std::memset(gradient + j * scratch_.stride, 0, sizeof(Real) * kGroup<Real>);
    }
  }

  // f(first key, last key, lanes) over [begin, end): each strip of keys takes the lanes that see some of it; equal neighbours go
  // together.
  template <int64_t kStrip, class F>
  void each_strip(int64_t begin, int64_t end, const F& f) {
    Range taken{0, 0};
    int64_t start = begin;
    const auto flush = [&](int64_t stop) {
      if (start < stop && taken.begin < taken.end) f(start, stop, taken);
    };
    for (int64_t key = begin; key < end; key += kStrip) {
      const problem::Span rows = interval_.viewers(key, least(key + kStrip, end), s_.rows);
      const Range range{most(rows.first * heads_ - first_lane_, 0), least(rows.last * heads_ - first_lane_, lanes_)};
      if (key > begin && range.begin == taken.begin && range.end == taken.end) continue;
      flush(key);
      start = key;
      taken = range;
    }
    flush(end);
  }
  // dV and dK of keys [begin, end).
  void sum_strip(int64_t block, int64_t begin, int64_t end, Range lanes) {
    // In fp32 what a running sum rounds away grows with its length and shows where few rows are summed.
    const int64_t addends = p_.dtype != DType::kFloat32 || s_.rows >= 768 ? 96 : s_.rows >= 192 ? 64 : 32;
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += addends)
      sum_lanes(begin - block, begin, end, {lane, least(lane + addends, lanes.end)});
  }
  void sum_lanes(int64_t row, int64_t begin, int64_t end, Range lanes) {
    const int64_t dim = spaced<Real>(p_.head_dim), value_dim = spaced<Real>(p_.value_dim), stride = scratch_.stride;
    const int64_t at = row * stride + lanes.begin, count = lanes.end - lanes.begin;
    if (task_.dvalue)
      accumulate_rows(scratch_.tile + at, stride, scratch_.natural_douts + lanes.begin * value_dim, value_dim, count,
                      static_cast<Real*>(task_.dvalue) + begin * task_.dvalue_stride, task_.dvalue_stride, end - begin,
                      padded<Real>(p_.value_dim));
    if (task_.dkey)
      accumulate_rows(scratch_.gradient + at, stride, scratch_.natural_queries + lanes.begin * dim, dim, count,
                      static_cast<Real*>(task_.dkey) + begin * task_.dkey_stride, task_.dkey_stride, end - begin,
                      padded<Real>(p_.head_dim));
  }

  template <class T>
  void store_queries(int i) {
    const Group<Real>& g = scratch_.groups[i];
    Real ones[kGroup<Real>];
    for (Real& one : ones) one = 1;
    if (!scratch_.started[i]) std::memset(dqueries(i), 0, sizeof(Real) * kGroup<Real> * p_.head_dim);
    if (task_.dquery) {
      Real* rows[kGroup<Real>];
      sum_rows(g, rows);
      unpack<Real, Real>(dqueries(i), p_.head_dim, g.lanes, ones, rows);
    } else {
      T* rows[kGroup<Real>];
      lane_rows(g, task_.gradients->dquery, s_, rows);
      unpack<Real, T>(dqueries(i), p_.head_dim, g.lanes, ones, rows);
    }
  }

  const BackwardTask& task_;
  const int64_t heads_;
  int64_t lanes_ = 0, first_lane_ = 0;
  int count_ = 0;
};

template <class Real>
size_t backward_scratch(const Problem& p, const Tiling& tiling) {
  Arena arena{0};
  BackwardScratch<Real> scratch(arena, p, tiling);
  return arena.next;
}

template <class Real>
void backward_task(const BackwardTask& task, const Tiling& tiling, void* scratch) {
  Backward<Real>(task, tiling, scratch).run();
}

}  // namespace
}  // namespace flash::cpu
