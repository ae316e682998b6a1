// cpu/forward.h: attention of a block of lanes over a range of keys.
#pragma once
#include "cpu/few.h"
#include "cpu/kernels.h"
#include "cpu/score.h"

namespace flash::cpu {
namespace {

constexpr int64_t kAlign = 64;

// Hands out pieces of the scratch memory; from address 0 it measures.
struct Arena {
  uintptr_t next;
  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(next);
    next = (next + count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return at;
  }
};

template <class Real>
int64_t padded(int64_t dim) {
  return (dim + kWidth<Real> - 1) / kWidth<Real> * kWidth<Real>;
}
// The distance of rows that a product walks down: a cache line more, or rows of a power of two would share few cache sets.
template <class Real>
int64_t spaced(int64_t dim) {
  return padded<Real>(dim) + kAlign / static_cast<int64_t>(sizeof(Real));
}

// Rows of K or V as Real numbers: in place where they are, else widened into `buffer` once for all lane groups.
template <class Real>
struct Rows {
  const Real* data;
  int64_t stride;
};
template <class Real>
Rows<Real> real_rows(DType type, const problem::Array& a, int64_t batch, int64_t head, int64_t row, int64_t count, int64_t dim,
                     Real* buffer) {
  Rows<Real> result{buffer, padded<Real>(dim)};
  const int64_t at = problem::offset(a, batch, head, row);
  with_real_type<Real>(type, [&](auto tag) {
    using T = decltype(tag);
    const T* from = static_cast<const T*>(a.data) + at;
    if constexpr (sizeof(T) == sizeof(Real)) {
      result = {from, a.row};
    } else {
      widen_rows<Real, T>(from, a.row, count, dim, buffer, result.stride);
    }
  });
  return result;
}

// Pointers to the rows of a group's lanes in query, out, ...
template <class Real, class T>
void lane_rows(const Group<Real>& g, const problem::Array& a, const problem::Sequence& s, T** rows) {
  for (int i = 0; i < kGroup<Real>; ++i)
    rows[i] = static_cast<T*>(a.data) + problem::offset(a, s.batch, g.head[i], s.row + g.row[i]);
}

// Whether vectors run along head_dim. By the rows of the sequence: a task's share of them depends on the number of threads.
inline bool few_lanes(const ForwardTask& task) {
  return task.sequence.rows * (task.problem->heads / task.problem->kv_heads) <= kFew;
}

template <class Real>
struct ForwardScratch {
  Group<Real>* groups;       // [groups]
  Real *queries, *sums;      // [groups][head_dim], [groups][value_dim] rows of kGroup lanes; few lanes: [lane][dim]
  Real *largest, *total;     // [groups][kGroup]
  Real *now, *factor;        // [kGroup]
  Real *tile, *bias, *keep;  // [keys][kGroup]
  Real *keys, *values;       // [keys][dim], widened
  bool* started;             // [groups]: sums hold something

  ForwardScratch(Arena& arena, const Problem& p, const Tiling& tiling) {
    const int64_t count = tiling.lanes / kGroup<Real>, tile_size = tiling.keys * kGroup<Real>;
    const bool widened = size_of(p.dtype) != sizeof(Real);
    groups = arena.take<Group<Real>>(count);
    queries = arena.take<Real>(count * kGroup<Real> * padded<Real>(p.head_dim));
    sums = arena.take<Real>(count * kGroup<Real> * padded<Real>(p.value_dim));
    largest = arena.take<Real>(count * kGroup<Real>);
    total = arena.take<Real>(count * kGroup<Real>);
    now = arena.take<Real>(kGroup<Real>);
    factor = arena.take<Real>(kGroup<Real>);
    tile = arena.take<Real>(tile_size);
    bias = arena.take<Real>(p.mask.data ? tile_size : 0);
    keep = arena.take<Real>(p.dropout_p > 0 ? tile_size : 0);
    keys = arena.take<Real>(widened ? tiling.keys * padded<Real>(p.head_dim) : 0);
    values = arena.take<Real>(widened ? tiling.keys * padded<Real>(p.value_dim) : 0);
    started = arena.take<bool>(count);
  }
};

template <class Real>
class Forward {
 public:
  Forward(const ForwardTask& task, const Tiling& tiling, void* memory)
      : task_(task),
        tiling_(tiling),
        p_(*task.problem),
        s_(task.sequence),
        rules_(p_),
        interval_(problem::interval(p_, s_.rows, s_.keys)),
        arena_{reinterpret_cast<uintptr_t>(memory)},
        scratch_(arena_, p_, tiling),
        few_(few_lanes(task)) {}

  void run() {
    start();
    with_real_type<Real>(p_.dtype, [&](auto tag) { load_queries<decltype(tag)>(); });
    each_block(few_plain_ ? kFewBlock * tiling_.keys : tiling_.keys, [&](int64_t begin, int64_t end) { block(begin, end); });
    end();
  }

 protected:
  void start() {
    const int64_t heads = p_.heads / p_.kv_heads;
    for (int64_t lane = task_.lane_begin; lane < task_.lane_end; lane += kGroup<Real>, ++count_)
      fill_group(scratch_.groups[count_], p_, s_, task_.kv_head, heads, lane, least(lane + kGroup<Real>, task_.lane_end));
    for (int64_t i = 0; i < count_ * kGroup<Real>; ++i) {
      scratch_.largest[i] = -std::numeric_limits<Real>::infinity();
      scratch_.total[i] = 0;
    }
    for (int i = 0; i < count_; ++i) scratch_.started[i] = false;
    const problem::Span all = interval_.common(scratch_.groups[0].row_begin, scratch_.groups[0].row_end);
    few_plain_ = few_ && !rules_.modified && !rules_.dropped && all.first <= task_.key_begin && task_.key_end <= all.last;
  }
  template <class F>
  void each_block(int64_t keys, const F& f) {
    const problem::Span seen = interval_.rows(scratch_.groups[0].row_begin, scratch_.groups[count_ - 1].row_end);
    const int64_t first = most(seen.first, task_.key_begin), last = least(seen.last, task_.key_end);
    for (int64_t key = first; key < last; key += keys) f(key, least(key + keys, last));
  }
  void end() {
    with_real_type<Real>(p_.dtype, [&](auto tag) {
      for (int i = 0; i < count_; ++i) finish<decltype(tag)>(i);
    });
  }

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

  Real* queries(int i) { return scratch_.queries + i * kGroup<Real> * p_.head_dim; }
  Real* sums(int i) { return scratch_.sums + i * kGroup<Real> * p_.value_dim; }

  template <class T>
  void load_queries() {
    for (int i = 0; i < count_; ++i) {
      const Group<Real>& g = scratch_.groups[i];
      T* rows[kGroup<Real>];
      lane_rows(g, p_.query, s_, rows);
      if (few_) {
        for (int lane = 0; lane < g.lanes; ++lane)
          few_query(rows[lane], p_.head_dim, rules_.query_factor, queries(i) + lane * padded<Real>(p_.head_dim));
      } else {
        pack<Real, T>(rows, 0, p_.head_dim, g.vectors, rules_.query_factor, queries(i));
      }
    }
  }

  // Keys [begin, end) for all groups.
  void block(int64_t begin, int64_t end) {
    if (few_) {
      with_real_type<Real>(p_.dtype, [&](auto tag) { few_step<decltype(tag)>(begin, end); });
      return;
    }
    const int64_t count = end - begin;
    const Rows<Real> keys =
        real_rows(p_.dtype, p_.key, s_.batch, task_.kv_head, s_.key + begin, count, p_.head_dim, scratch_.keys);
    const Rows<Real> values =
        real_rows(p_.dtype, p_.value, s_.batch, task_.kv_head, s_.key + begin, count, p_.value_dim, scratch_.values);
    for (int i = 0; i < count_; ++i) {
      const Group<Real>& g = scratch_.groups[i];
      fetch(p_.key, p_.head_dim, end + i * count / count_, end + (i + 1) * count / count_);
      fetch(p_.value, p_.value_dim, end + i * count / count_, end + (i + 1) * count / count_);
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t from = most(seen.first, begin), to = least(seen.last, end);
      if (from >= to) continue;
      with_vectors(g.vectors, [&](auto vectors) {
        step<decltype(vectors)::value>(i, from, to, {keys.data + (from - begin) * keys.stride, keys.stride},
                                       {values.data + (from - begin) * values.stride, values.stride});
      });
    }
  }

  // Rows [begin, end) of the next block of K or V on their way to the second-level cache.
  void fetch(const problem::Array& a, int64_t dim, int64_t begin, int64_t end) const {
    const int64_t bytes = size_of(p_.dtype);
    for (int64_t j = begin; j < least(end, task_.key_end); ++j) {
      const char* row = static_cast<const char*>(a.data) + problem::offset(a, s_.batch, task_.kv_head, s_.key + j) * bytes;
      for (int64_t at = 0; at < dim * bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
  }

  // Keys [from, to), each seen by some row of group i.
  template <int NV>
  void step(int i, int64_t from, int64_t to, Rows<Real> keys, Rows<Real> values) {
    const Group<Real>& g = scratch_.groups[i];
    Real *tile = scratch_.tile, *now = scratch_.now, *largest = scratch_.largest + i * kGroup<Real>;
    std::memcpy(now, largest, sizeof(Real) * kGroup<Real>);
    const problem::Span all = interval_.common(g.row_begin, g.row_end);
    if (rules_.modified) {
      scores<Real, NV, false>(keys.data, keys.stride, queries(i), p_.head_dim, tile, kGroup<Real>, to - from, nullptr);
      finish_scores(g, from, to, from < all.first || to > all.last);
    } else {  // the maximum is taken in passing where every row sees the key
      const int64_t full = least(most(all.first, from), to), full_end = most(least(all.last, to), full);
      const auto edge = [&](int64_t begin, int64_t end) {
        if (begin >= end) return;
        Real* at = tile + (begin - from) * kGroup<Real>;
        edge_scores<Real, NV>(g, interval_, begin, end - begin, keys.data + (begin - from) * keys.stride, keys.stride,
                              queries(i), p_.head_dim, at, kGroup<Real>);
        adjust<Real>(rules_, g, Bounds<Real>(g, interval_, begin, end - begin), nullptr, true, end - begin, at, kGroup<Real>,
                     nullptr);
        take_largest(g.vectors, end - begin, at, now);
      };
      edge(from, full);
      if (full < full_end)
        scores<Real, NV, true>(keys.data + (full - from) * keys.stride, keys.stride, queries(i), p_.head_dim,
                               tile + (full - from) * kGroup<Real>, kGroup<Real>, full_end - full, now);
      edge(full_end, to);
    }
    const bool moved = probabilities<NV>(i, from, to);
    accumulate<Real, NV>(values.data, values.stride, tile, kGroup<Real>, to - from, sums(i), p_.value_dim, scratch_.factor,
                         !scratch_.started[i] ? Into::kReplace
                         : moved              ? Into::kRescale
                                              : Into::kAdd);
    scratch_.started[i] = true;
  }

  // A single query row (or as many as a small group of heads gives): lanes of the products run along head_dim.
  template <class T>
  void few_step(int64_t from, int64_t to) {
    const Group<Real>& g = scratch_.groups[0];
    const T* keys = static_cast<const T*>(p_.key.data) + problem::offset(p_.key, s_.batch, task_.kv_head, s_.key + from);
    const T* values = static_cast<const T*>(p_.value.data) + problem::offset(p_.value, s_.batch, task_.kv_head, s_.key + from);
    const Strides at = few_plain_ ? Strides{1, kFewBlock * tiling_.keys} : Strides{kGroup<Real>, 1};
    few_scores<Real, T>(keys, p_.key.row, to - from, p_.head_dim, queries(0), padded<Real>(p_.head_dim), g.lanes, scratch_.tile,
                        at);
    if (few_plain_) {  // vectors along the keys
      for (int lane = 0; lane < g.lanes; ++lane)
        few_exponentiate(rules_.unit, scratch_.tile + lane * at.lane, to - from, scratch_.largest + lane, scratch_.total + lane,
                         scratch_.factor + lane);
    } else {
      std::memcpy(scratch_.now, scratch_.largest, sizeof(Real) * kGroup<Real>);
      const problem::Span all = interval_.common(g.row_begin, g.row_end);
      with_vectors(g.vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        finish_scores(g, from, to, from < all.first || to > all.last);
        probabilities<NV>(0, from, to);
      });
    }
    few_accumulate<Real, T>(values, p_.value.row, to - from, p_.value_dim, scratch_.tile, at, g.lanes, scratch_.factor,
                            !scratch_.started[0], sums(0), padded<Real>(p_.value_dim));
    scratch_.started[0] = true;
  }

  void finish_scores(const Group<Real>& g, int64_t from, int64_t to, bool partial) {
    if (p_.mask.data) mask_tile(p_, g, from, to - from, scratch_.bias);
    if (rules_.modified || partial)
      adjust<Real>(rules_, g, Bounds<Real>(g, interval_, from, to - from), p_.mask.data ? scratch_.bias : nullptr, partial,
                   to - from, scratch_.tile, kGroup<Real>, nullptr);
    take_largest(g.vectors, to - from, scratch_.tile, scratch_.now);
  }

  template <int NV>
  bool probabilities(int i, int64_t from, int64_t to) {
    const bool moved = exponentiate<Real, NV>(rules_.unit, scratch_.tile, to - from, scratch_.largest + i * kGroup<Real>,
                                              scratch_.now, scratch_.total + i * kGroup<Real>, scratch_.factor);
    if (rules_.dropped) {
      dropout_tile(rules_, scratch_.groups[i], s_.batch, from, to - from, scratch_.keep);
      drop<Real>(scratch_.groups[i].vectors, scratch_.keep, to - from, scratch_.tile);
    }
    return moved;
  }

  template <class T>
  void finish(int i) {
    const Group<Real>& g = scratch_.groups[i];
    const int64_t stride = few_ ? padded<Real>(p_.value_dim) : kGroup<Real>;
    if (!scratch_.started[i]) std::memset(sums(i), 0, sizeof(Real) * (few_ ? g.lanes * stride : kGroup<Real> * p_.value_dim));
    Real factor[kGroup<Real>] = {};
    T* out[kGroup<Real>];
    Real* part[kGroup<Real>];
    for (int lane = 0; lane < g.lanes; ++lane) {
      // In double: lse is rounded once, which is all that backward loses by starting from it.
      problem::Softmax<double> state;
      state.max = static_cast<double>(scratch_.largest[i * kGroup<Real> + lane]) * rules_.scale * state.kLog2e;
      state.sum = scratch_.total[i * kGroup<Real> + lane];
      factor[lane] = 1;
      if (task_.partial) {
        part[lane] = static_cast<Real*>(task_.partial) + (i * kGroup<Real> + lane) * (p_.value_dim + kStatistics);
        Real* statistics = part[lane] + p_.value_dim;
        statistics[0] = static_cast<Real>(state.max);
        statistics[1] = state.sum == 0 ? Real(0) : static_cast<Real>(state.max - statistics[0]);
        statistics[2] = static_cast<Real>(state.sum);
        continue;
      }
      const double shrink = p_.sinks ? state.fold_sink(static_cast<const Real*>(p_.sinks)[g.head[lane]]) : 1;
      factor[lane] = static_cast<Real>(shrink * state.normaliser());
      if (p_.lse)
        static_cast<Real*>(p_.lse)[problem::lse_offset(p_, s_.batch, g.head[lane], s_.row + g.row[lane])] =
            static_cast<Real>(state.lse());
    }
    if (task_.partial) {
      if (few_) {
        few_store<Real, Real>(sums(i), stride, p_.value_dim, g.lanes, factor, part);
      } else {
        unpack<Real, Real>(sums(i), p_.value_dim, g.lanes, factor, part);
      }
      return;
    }
    lane_rows(g, p_.out, s_, out);
    if (few_) {
      few_store<Real, T>(sums(i), stride, p_.value_dim, g.lanes, factor, out);
    } else {
      unpack<Real, T>(sums(i), p_.value_dim, g.lanes, factor, out);
    }
  }

  const ForwardTask& task_;
  const Tiling& tiling_;
  const Problem& p_;
  const problem::Sequence& s_;
  const Rules<Real> rules_;
  const problem::Interval interval_;
  Arena arena_;
  ForwardScratch<Real> scratch_;
  static constexpr int64_t kFewBlock =
      kGroup<Real> / kFew;  // tiles of keys at a time: K and V take turns, which caches look ahead over
  const bool few_;
  bool few_plain_ = false;  // few lanes, of which each sees every key of the task, unmodified
  int count_ = 0;
};

template <class Real>
size_t forward_scratch(const Problem& p, const Tiling& tiling) {
  Arena arena{0};
  ForwardScratch<Real> scratch(arena, p, tiling);
  return arena.next;
}

template <class Real>
void forward_task(const ForwardTask& task, const Tiling& tiling, void* scratch) {
  Forward<Real>(task, tiling, scratch).run();
}

}  // namespace
}  // namespace flash::cpu
