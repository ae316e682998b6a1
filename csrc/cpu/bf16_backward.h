// cpu/bf16_backward.h: backward.h with all five products in bf16. P and dS are rounded to bf16 for the three products that
// take them in; the sums are fp32.
#pragma once
#include "cpu/backward.h"
#include "cpu/product.h"

namespace flash::cpu {
namespace {

class Bf16Backward : Backward<float> {
  static constexpr int kLanes = kGroup<float>;

 public:
  static bool takes(const Problem& p) {
    return p.dtype == DType::kBFloat16 && p.head_dim % kPanel == 0 && p.value_dim % kPanel == 0;
  }
  static size_t scratch(const Problem& p, const Tiling& tiling) {
    return backward_scratch<float>(p, tiling) + 2 * tiling.keys * row_of(tiling) * sizeof(BFloat16) + 2 * kAlign;
  }

  Bf16Backward(const BackwardTask& task, const Tiling& tiling, void* memory)
      : Backward(task, tiling, memory),
        row_(row_of(tiling)),
        probabilities_(arena_.take<BFloat16>(tiling.keys * row_)),
        gradients_(arena_.take<BFloat16>(tiling.keys * row_)) {}

  void run() {
    begin_products();
    Backward::run();
    end_products();
  }

 private:
  static int64_t row_of(const Tiling& tiling) { return panels(tiling.lanes) + kPanel; }  // a cache line more, as stride has

  BFloat16* query_pairs(int i) { return reinterpret_cast<BFloat16*>(queries(i)); }
  BFloat16* dout_pairs(int i) { return reinterpret_cast<BFloat16*>(douts(i)); }

  void load() override {
    std::memset(probabilities_, 0, tiling_.keys * row_ * sizeof(BFloat16));  // lanes past the last stay 0
    std::memset(gradients_, 0, tiling_.keys * row_ * sizeof(BFloat16));
    pair(p_.query, p_.head_dim, scratch_.queries, scratch_.natural_queries);
    pair(task_.gradients->dout, p_.value_dim, scratch_.douts, scratch_.natural_douts);
  }
  // Pairs along dim of every group of lanes, and pairs of lanes.
  void pair(const problem::Array& a, int64_t dim, float* columns, float* rows) {
    for (int i = 0; i < count_; ++i) {
      const Group<float>& g = scratch_.groups[i];
      BFloat16* lanes[kLanes];
      lane_rows(g, a, s_, lanes);
      pair_columns(lanes, dim, g.vectors, 2 * kLanes, reinterpret_cast<BFloat16*>(columns + i * kLanes * dim));
      pair_rows(lanes, g.lanes, kLanes, dim, reinterpret_cast<BFloat16*>(rows) + i * kLanes * dim);
    }
    const int64_t lanes = count_ * kLanes;
    std::memset(reinterpret_cast<BFloat16*>(rows) + lanes * dim, 0, (panels(lanes) - lanes) * dim * sizeof(BFloat16));
  }

  BFloat16* row(const problem::Array& a, int64_t key) const {
    return static_cast<BFloat16*>(a.data) + problem::offset(a, s_.batch, task_.kv_head, s_.key + key);
  }

  void block(int64_t begin, int64_t end) override {
    BFloat16* keys = reinterpret_cast<BFloat16*>(scratch_.keys);
    if (task_.gradients->dquery.data)
      transpose_rows(row(p_.key, begin), p_.key.row, end - begin, p_.head_dim, keys, 16 * kPanel, kPanel * p_.head_dim);
    for (int i = 0; i < count_; ++i) {
      const Group<float>& g = scratch_.groups[i];
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t first = least(most(seen.first, begin), end), to = most(least(seen.last, end), first);
      const int64_t from = begin + (first - begin) / kPanel * kPanel;  // whole panels of keys
      clear(i, 0, from - begin);
      clear(i, to - begin, end - begin);
      if (first == to) continue;
      with_vectors(g.vectors, [&](auto vectors) {
        group<decltype(vectors)::value>(i, from, to, from - begin, keys + (from - begin) * p_.head_dim);
      });
      scratch_.started[i] = true;
    }
    if (task_.dkey || task_.dvalue)
      each_strip<kPanel>(begin, end, [&](int64_t first, int64_t last, Range seen) { sum(first - begin, first, last, seen); });
  }

  void clear(int i, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j)
      for (int which = 0; which < 2; ++which)
        std::memset((which ? gradients_ : probabilities_) + j * row_ + i * kLanes, 0, kLanes * sizeof(BFloat16));
  }

  // Keys [from, to) for group i; `at` is the row of the first.
  template <int V>
  void group(int i, int64_t from, int64_t to, int64_t at, const BFloat16* keys) {
    const int64_t count = to - from;
    float *tile = scratch_.tile, *gradient = scratch_.gradient;
    multiply<V, false>(rows_of(row(p_.key, from), p_.key.row), query_pairs(i), 2 * kLanes, p_.head_dim, tile, kLanes, count);
    multiply<V, false>(rows_of(row(p_.value, from), p_.value.row), dout_pairs(i), 2 * kLanes, p_.value_dim, gradient, kLanes,
                       count);
    if (rules_.query_factor != 1)
      each_vector(V, count, tile, kLanes, [&](int) { return [=, this](auto x, int64_t) { return x * rules_.query_factor; }; });
    weigh<V>(i, from, to, tile, gradient, kLanes, static_cast<float>(p_.scale), true);
    round_rows(tile, kLanes, count, V, probabilities_ + at * row_ + i * kLanes, row_);
    round_rows(gradient, kLanes, count, V, gradients_ + at * row_ + i * kLanes, row_);
    if (!task_.gradients->dquery.data) return;
    pair_tile(gradient, kLanes, count, V, gradient);
    const Left left{keys, kPanel, kPanel * p_.head_dim, 16 * kPanel};
    const BFloat16* pairs = reinterpret_cast<const BFloat16*>(gradient);
    if (scratch_.started[i]) {
      multiply<V, true>(left, pairs, 2 * kLanes, panels(count), dqueries(i), kLanes, p_.head_dim);
    } else {
      multiply<V, false>(left, pairs, 2 * kLanes, panels(count), dqueries(i), kLanes, p_.head_dim);
    }
  }

  // dV and dK of keys [first, last) from `lanes`; `at` is the row of the first.
  void sum(int64_t at, int64_t first, int64_t last, Range lanes) {
    lanes = {lanes.begin / kPanel * kPanel, panels(lanes.end)};
    const auto add = [&](const BFloat16* left, float* natural, int64_t dim, void* sums, int64_t stride) {
      if (sums == nullptr) return;
      const BFloat16* pairs = reinterpret_cast<const BFloat16*>(natural) + lanes.begin * dim;
      float* to = static_cast<float*>(sums) + first * stride;
      for (int64_t d = 0; d < dim; d += kLanes)
        with_vectors(static_cast<int>(least(dim - d, kLanes) / kWidth<float>), [&](auto vectors) {
          multiply<decltype(vectors)::value, true>(rows_of(left + at * row_ + lanes.begin, row_), pairs + 2 * d, 2 * dim,
                                                   lanes.end - lanes.begin, to + d, stride, last - first);
        });
    };
    add(probabilities_, scratch_.natural_douts, p_.value_dim, task_.dvalue, task_.dvalue_stride);
    add(gradients_, scratch_.natural_queries, p_.head_dim, task_.dkey, task_.dkey_stride);
  }

  const int64_t row_;
  BFloat16 *probabilities_, *gradients_;  // [keys][row_]: P and dS of all lanes
};

size_t bf16_backward_scratch(const Problem& p, const Tiling& tiling) { return Bf16Backward::scratch(p, tiling); }

void bf16_backward_task(const BackwardTask& task, const Tiling& tiling, void* scratch) {
  if (Bf16Backward::takes(*task.problem)) {
    Bf16Backward(task, tiling, scratch).run();
  } else {
    backward_task<float>(task, tiling, scratch);
  }
}

}  // namespace
}  // namespace flash::cpu
