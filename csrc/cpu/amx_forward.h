// cpu/amx_forward.h: forward.h for bf16 with both products on AMX: queries, keys and values are never widened, and probabilities are
// rounded to bf16 for the second product, as every implementation on matrix units does.
#pragma once
#include "cpu/amx.h"
#include "cpu/forward.h"

namespace flash::cpu {
namespace {

class AmxForward : Forward<float> {
  static constexpr int kLanes = kGroup<float>;

 public:
  using Forward<float>::Forward;

  static bool takes(const ForwardTask& task) {
    const Problem& p = *task.problem;
    return p.dtype == DType::kBFloat16 && p.head_dim % kPanel == 0 && p.value_dim % kWidth<float> == 0 &&
           task.lane_end - task.lane_begin > kFew;
  }

  void run() {
    start();
    for (int i = 0; i < count_; ++i) {
      BFloat16* rows[kLanes];
      lane_rows(scratch_.groups[i], p_.query, s_, rows);
      pair_columns(rows, p_.head_dim, scratch_.groups[i].vectors, 2 * kLanes, query_pairs(i));
    }
    each_block([&](int64_t begin, int64_t end) { block(begin, end); });
    _tile_release();
    end();
  }

 private:
  BFloat16* query_pairs(int i) { return reinterpret_cast<BFloat16*>(queries(i)); }

  const BFloat16* row(const problem::Array& a, int64_t key) const {
    return static_cast<const BFloat16*>(a.data) + problem::offset(a, s_.batch, task_.kv_head, s_.key + key);
  }

  void block(int64_t begin, int64_t end) {
    BFloat16* values = reinterpret_cast<BFloat16*>(scratch_.values);
    transpose_rows(row(p_.value, begin), p_.value.row, end - begin, p_.value_dim, values);
    for (int i = 0; i < count_; ++i) {
      const Group<float>& g = scratch_.groups[i];
      fetch(p_.key, p_.head_dim, end + i * (end - begin) / count_, end + (i + 1) * (end - begin) / count_);
      fetch(p_.value, p_.value_dim, end + i * (end - begin) / count_, end + (i + 1) * (end - begin) / count_);
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t first = most(seen.first, begin), to = least(seen.last, end);
      if (first >= to) continue;
      const int64_t from = begin + (first - begin) / kPanel * kPanel;  // whole panels of values
      with_vectors(g.vectors,
                   [&](auto vectors) { step<decltype(vectors)::value>(i, from, to, values + (from - begin) * p_.value_dim); });
    }
  }

  // Keys [from, to) for group i.
  template <int V>
  void step(int i, int64_t from, int64_t to, const BFloat16* values) {
    const Group<float>& g = scratch_.groups[i];
    const int64_t count = to - from;
    float *tile = scratch_.tile, *largest = scratch_.largest + i * kLanes;
    multiply<V, false>({row(p_.key, from), p_.key.row, kPanel}, query_pairs(i), 2 * kLanes, p_.head_dim, tile, kLanes, count);
    if (rules_.query_factor != 1)
      each_vector(g.vectors, count, tile, kLanes,
                  [&](int) { return [=, this](auto x, int64_t) { return x * rules_.query_factor; }; });
    std::memcpy(scratch_.now, largest, sizeof(float) * kLanes);
    const problem::Span all = interval_.common(g.row_begin, g.row_end);
    finish_scores(g, from, to, from < all.first || to > all.last);
    const bool moved = probabilities<V>(i, from, to);
    pair_tile(tile, kLanes, count, g.vectors);
    if (scratch_.started[i] && moved)
      each_vector(g.vectors, p_.value_dim, sums(i), kLanes,
                  [&](int at) { return [factor = load(scratch_.factor + at)](auto x, int64_t) { return x * factor; }; });
    const Left left{values, kPanel, kPanel * p_.value_dim};
    const BFloat16* pairs = reinterpret_cast<const BFloat16*>(tile);
    if (scratch_.started[i]) {
      multiply<V, true>(left, pairs, 2 * kLanes, panels(count), sums(i), kLanes, p_.value_dim);
    } else {
      multiply<V, false>(left, pairs, 2 * kLanes, panels(count), sums(i), kLanes, p_.value_dim);
    }
    scratch_.started[i] = true;
  }
};

void amx_forward_task(const ForwardTask& task, const Tiling& tiling, void* scratch) {
  if (AmxForward::takes(task)) {
    AmxForward(task, tiling, scratch).run();
  } else {
    forward_task<float>(task, tiling, scratch);
  }
}

}  // namespace
}  // namespace flash::cpu
