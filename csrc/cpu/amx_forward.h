// cpu/amx_forward.h: forward.h for bf16 with both products on AMX: queries, keys and values are never widened, and probabilities are
// rounded to bf16 for the second product, as every implementation on matrix units does.
#pragma once
#include "cpu/amx.h"
#include "cpu/forward.h"

namespace flash::cpu {
namespace {

// x = 2^x, for x <= 128: 7.5e-8 off at most, 0 at -inf. The fraction is in [0, 1), minimax.
template <int N>
FLASH_INLINE void exp2_down(Vector<float> (&x)[N]) {
  constexpr float kTerms[] = {0x1.ec3212p-10f, 0x1.26900ep-7f, 0x1.c95446p-5f, 0x1.ebd5aap-3f, 0x1.62e4f6p-1f, 0x1.fffffep-1f};
  Vector<float> fraction[N], p[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) fraction[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) p[i] = fma(set(kTerms[0]), fraction[i], set(kTerms[1]));
#pragma GCC unroll 4
  for (int k = 2; k < 6; ++k)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], fraction[i], set(kTerms[k]));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) x[i] = _mm512_scalef_ps(p[i], x[i]);
}

// exponentiate() of score.h, with the probabilities rounded to bf16 and keys paired, in the memory of the tile: zero up to the next
// multiple of 32 keys. A tie is rounded up.
template <int V>
FLASH_STAGE bool exponentiate_pairs(float unit, float* tile, int64_t keys, float* before, const float* after, float* sum,
                                    float* factor) {
  constexpr int W = kWidth<float>, kStride = kGroup<float>, N = 8;
  const Vector<float> none = set(-std::numeric_limits<float>::infinity()), c = set(unit);
  const auto half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  bool moved = false;
  for (int at = 0; at < V * W; at += W) {
    const Vector<float> old = load(before + at), now = load(after + at);
    const Vector<float> top = (now == none ? Vector<float>{} : now) * c;  // Softmax::reference
    const __mmask16 same = _mm512_cmp_ps_mask(old, now, _CMP_EQ_OQ);
    moved |= same != 0xffff;
    Vector<float> shrink[1] = {old * c - top};
    exp2_down(shrink);
    const Vector<float> change = _mm512_mask_blend_ps(same, shrink[0], set(1.0f));
    store(factor + at, change);
    store(before + at, now);
    Vector<float> sums[2] = {};
    const auto rows = [&](int64_t j, int64_t live) FLASH_LAMBDA {
      const float* from = tile + j * kStride + at;
      Vector<float> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = i < live ? _mm512_fmsub_ps(load(from + i * kStride), c, top) : none;
      exp2_down(x);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sums[i & 1] += x[i];
#pragma GCC unroll 4
      for (int i = 0; i < N; i += 2) {
        const auto low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)x[i], half), 16);
        const auto high = _mm512_add_epi32((__m512i)x[i + 1], half);
        _mm512_storeu_si512(tile + (j + i) / 2 * kStride + at, _mm512_ternarylogic_epi32(upper, high, low, 0xCA));
      }
    };
    int64_t j = 0;
    for (; j + N <= keys; j += N) rows(j, N);
    if (j < keys) rows(j, keys - j), j += N;
    for (; j < panels(keys); j += 2) store(tile + j / 2 * kStride + at, Vector<float>{});
    store(sum + at, fma(load(sum + at), change, sums[0] + sums[1]));
  }
  return moved;
}

// take_largest() with chains enough to be bound by loads.
template <int V>
FLASH_STAGE void largest_of(const float* tile, int64_t keys, float* largest) {
  constexpr int W = kWidth<float>, kStride = kGroup<float>, N = 4;
  Vector<float> top[N][V];
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) top[i][v] = load(largest + v * W);
  int64_t j = 0;
  for (; j + N <= keys; j += N, tile += N * kStride)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) top[i][v] = max(load(tile + i * kStride + v * W), top[i][v]);
  for (; j < keys; ++j, tile += kStride)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) top[0][v] = max(load(tile + v * W), top[0][v]);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) store(largest + v * W, max(max(top[3][v], top[2][v]), max(top[1][v], top[0][v])));
}

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
    set_whole_registers();
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
    finish<V>(g, from, to);
    bool moved;
    if (rules_.dropped) {
      moved = probabilities<V>(i, from, to);
      pair_tile(tile, kLanes, count, V);
    } else {
      moved = exponentiate_pairs<V>(rules_.unit, tile, count, largest, scratch_.now, scratch_.total + i * kLanes, scratch_.factor);
    }
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

  // Modifiers, masks, and the largest scores. Without modifiers only keys that some row does not see need more than the last.
  template <int V>
  void finish(const Group<float>& g, int64_t from, int64_t to) {
    const problem::Span all = interval_.common(g.row_begin, g.row_end);
    if (rules_.modified) return finish_scores(g, from, to, from < all.first || to > all.last);
    const int64_t full = least(most(all.first, from), to), full_end = most(least(all.last, to), full);
    const auto edge = [&](int64_t begin, int64_t end) {
      if (begin < end)
        adjust<float>(rules_, g, Bounds<float>(g, interval_, begin, end - begin), nullptr, true, end - begin,
                      scratch_.tile + (begin - from) * kLanes, kLanes, nullptr);
    };
    edge(from, full);
    edge(full_end, to);
    largest_of<V>(scratch_.tile, to - from, scratch_.now);
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
