// cpu/bf16_forward.h: forward.h with both products in bf16: queries, keys and values are never widened, and probabilities are
// rounded to bf16 for the second product, as every implementation on matrix units does.
#pragma once
#include "cpu/forward.h"
#include "cpu/product.h"

namespace flash::cpu {
namespace {

// x = 2^x, for x <= 128: 7.5e-8 off at most, 0 below -126, where the instruction would take 200 cycles. The fraction is in [0, 1), minimax.
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
  for (int i = 0; i < N; ++i) x[i] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x[i], set(-126.0f), _CMP_NLT_UQ), p[i], x[i]);
}

// Probabilities relative to `top` of the scores of a tile, rounded to bf16, keys paired: zero up to the next multiple of 32 keys. A tie
// is rounded up. total takes in what they were before.
template <int V>
FLASH_STAGE void exponentiate_pairs(float unit, float* tile, int64_t keys, const float* top, float* total, float* to) {
  constexpr int W = kWidth<float>, kStride = kGroup<float>, N = 8;
  const Vector<float> none = set(-std::numeric_limits<float>::infinity()), c = set(unit);
  for (int64_t j = keys; j < panels(keys); ++j)
    for (int at = 0; at < V * W; at += W) store(tile + j * kStride + at, none);
  alignas(64) float tops[V * W], sums[V * W];
  for (int at = 0; at < V * W; at += W) {
    const Vector<float> x = load(top + at);
    store(tops + at, x == none ? Vector<float>{} : x);  // Softmax::reference
    store(sums + at, Vector<float>{});
  }
  const auto half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const float* from = tile;
  for (int64_t j = 0; j < panels(keys); j += N, from += N * kStride, to += N / 2 * kStride) {
#pragma GCC unroll 3
    for (int at = 0; at < V * W; at += W) {
      const Vector<float> reference = load(tops + at);
      Vector<float> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = (load(from + i * kStride + at) - reference) * c;  // exact where it matters
      exp2_down(x);
      store(sums + at, load(sums + at) + (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))));
#pragma GCC unroll 4
      for (int i = 0; i < N; i += 2) {
        const auto low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)x[i], half), 16);
        const auto high = _mm512_add_epi32((__m512i)x[i + 1], half);
        _mm512_storeu_si512(to + i / 2 * kStride + at, _mm512_ternarylogic_epi32(upper, high, low, 0xCA));
      }
    }
  }
  for (int at = 0; at < V * W; at += W) store(total + at, load(total + at) + load(sums + at));
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

class Bf16Forward : Forward<float> {
  static constexpr int kLanes = kGroup<float>;
  static constexpr int64_t kTile = 16 * kPanel;
  // Keys of a tile of scores. The unit of AMX is switched off some 700 cycles after its last product, and as many go by before the
  // next one runs, so phases are long; the maximum is followed, as then the largest probabilities lose least by rounding. With dot
  // products 128 keys are 1 % slower, 64 4 %.
  static constexpr int64_t kTileKeys = 256;

 public:
  static bool takes(const ForwardTask& task) {
    const Problem& p = *task.problem;
    return p.dtype == DType::kBFloat16 && p.head_dim % kPanel == 0 && p.value_dim % kWidth<float> == 0 && !few_lanes(task);
  }
  static size_t scratch(const Problem& p, const Tiling& tiling) {
    return forward_scratch<float>(p, tiling) + kTileKeys * kLanes * sizeof(float) +
           chunk_of(p) * (p.head_dim + p.value_dim) * sizeof(BFloat16) + 3 * kAlign;
  }

  Bf16Forward(const ForwardTask& task, const Tiling& tiling, void* memory)
      : Forward(task, tiling, memory),
        tile_(arena_.take<float>(kTileKeys * kLanes)),
        keys_(arena_.take<BFloat16>(chunk_of(p_) * p_.head_dim)),
        values_(arena_.take<BFloat16>(chunk_of(p_) * p_.value_dim)) {}

  void run() {
    start();
    for (int i = 0; i < count_; ++i) {
      BFloat16* rows[kLanes];
      lane_rows(scratch_.groups[i], p_.query, s_, rows);
      pair_columns(rows, p_.head_dim, scratch_.groups[i].vectors, 2 * kLanes, query_pairs(i));
    }
    begin_products();
    each_block(chunk_of(p_), [&](int64_t begin, int64_t end) { chunk(begin, end); });
    end_products();
    end();
  }

 private:
  // Keys whose values are transposed for all groups of lanes; a group goes through them before the next one starts.
  static int64_t chunk_of(const Problem& p) {
    return most(kTileKeys, (int64_t{1} << 16) / most(p.head_dim, p.value_dim) / kTileKeys * kTileKeys);
  }

  BFloat16* query_pairs(int i) { return reinterpret_cast<BFloat16*>(queries(i)); }

  const BFloat16* row(const problem::Array& a, int64_t key) const {
    return static_cast<const BFloat16*>(a.data) + problem::offset(a, s_.batch, task_.kv_head, s_.key + key);
  }

  void chunk(int64_t begin, int64_t end) {
    strip_ = panels(end - begin) / kPanel * kTile;
    tile_rows(row(p_.key, begin), p_.key.row, end - begin, p_.head_dim, keys_);
    transpose_rows(row(p_.value, begin), p_.value.row, end - begin, p_.value_dim, values_, strip_, kTile);
    for (int i = 0; i < count_; ++i) {
      const Group<float>& g = scratch_.groups[i];
      fetch(p_.key, p_.head_dim, end + i * (end - begin) / count_, end + (i + 1) * (end - begin) / count_);
      fetch(p_.value, p_.value_dim, end + i * (end - begin) / count_, end + (i + 1) * (end - begin) / count_);
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t first = most(seen.first, begin), to = least(seen.last, end);
      if (first >= to) continue;
      const int64_t from = begin + (first - begin) / kPanel * kPanel;  // whole panels of values
      with_vectors(g.vectors, [&](auto vectors) {
        walk<decltype(vectors)::value>(i, from, to, keys_ + (from - begin) * p_.head_dim,
                                       values_ + (from - begin) / kPanel * kTile);
      });
    }
  }

  // Keys [from, to) for group i.
  template <int V>
  void walk(int i, int64_t from, int64_t to, const BFloat16* keys, const BFloat16* values) {
    const Group<float>& g = scratch_.groups[i];
    float *tile = tile_, *top = scratch_.largest + i * kLanes, *total = scratch_.total + i * kLanes;
    for (int64_t key = from; key < to; key += kTileKeys) {
      const int64_t count = least(kTileKeys, to - key);
      multiply<V, false>({keys + (key - from) * p_.head_dim, kPanel, kTile, 16 * p_.head_dim}, query_pairs(i), 2 * kLanes,
                         p_.head_dim, tile, kLanes, (count + 15) / 16 * 16);
      settle(g, key, key + count);
      follow<V>(i, count, top, total);
      if (rules_.dropped) {
        exponentiate<float, V>(rules_.unit, tile, count, top, top, total, scratch_.factor);
        in_pieces(key, key + count, [&](int64_t begin, int64_t end) {
          dropout_tile(rules_, g, s_.batch, begin, end - begin, scratch_.keep);
          drop<float>(V, scratch_.keep, end - begin, tile + (begin - key) * kLanes);
        });
        pair_tile(tile, kLanes, count, V, tile);
      } else {
        exponentiate_pairs<V>(rules_.unit, tile, count, top, total, tile);
      }
      add<V>(i, count, values + (key - from) / kPanel * kTile);
    }
  }

  // The largest scores, and sums relative to them.
  template <int V>
  void follow(int i, int64_t count, float* top, float* total) {
    constexpr int W = kWidth<float>;
    std::memcpy(scratch_.now, top, sizeof(float) * kLanes);
    largest_of<V>(tile_, count, scratch_.now);
    const Vector<float> c = set(rules_.unit);
    __mmask16 moved = 0;
    for (int at = 0; at < V * W; at += W) {
      const Vector<float> old = load(top + at), now = load(scratch_.now + at);
      const __mmask16 other = _mm512_cmp_ps_mask(old, now, _CMP_NEQ_OQ);
      const Vector<float> factor = _mm512_mask_blend_ps(other, set(1.0f), exp2<float>(old - now, c));
      moved |= other;
      store(top + at, now);
      store(total + at, load(total + at) * factor);
      store(scratch_.factor + at, factor);
    }
    if (moved && scratch_.started[i])
      each_vector(V, p_.value_dim, sums(i), kLanes,
                  [&](int at) { return [factor = load(scratch_.factor + at)](auto x, int64_t) { return x * factor; }; });
  }

  // Sums take in the values of `count` keys.
  template <int V>
  void add(int i, int64_t count, const BFloat16* values) {
    const Left left{values, kPanel, kTile, strip_};
    const BFloat16* pairs = reinterpret_cast<const BFloat16*>(tile_);
    if (scratch_.started[i]) {
      multiply<V, true>(left, pairs, 2 * kLanes, panels(count), sums(i), kLanes, p_.value_dim);
    } else {
      multiply<V, false>(left, pairs, 2 * kLanes, panels(count), sums(i), kLanes, p_.value_dim);
    }
    scratch_.started[i] = true;
  }

  // f(begin, end) over pieces as long as what scratch_ has room for beside a tile.
  template <class F>
  void in_pieces(int64_t begin, int64_t end, const F& f) const {
    for (; begin < end; begin += tiling_.keys) f(begin, least(begin + tiling_.keys, end));
  }

  // Modifiers and masks. Without modifiers only keys that some row does not see need them.
  void settle(const Group<float>& g, int64_t from, int64_t to) {
    float* tile = tile_;
    if (rules_.query_factor != 1)
      each_vector(g.vectors, to - from, tile, kLanes,
                  [&](int) { return [=, this](auto x, int64_t) { return x * rules_.query_factor; }; });
    const problem::Span all = interval_.common(g.row_begin, g.row_end);
    const auto edge = [&](int64_t first, int64_t last, bool partial) {
      in_pieces(first, last, [&](int64_t begin, int64_t end) {
        if (p_.mask.data) mask_tile(p_, g, begin, end - begin, scratch_.bias);
        adjust<float>(rules_, g, Bounds<float>(g, interval_, begin, end - begin), p_.mask.data ? scratch_.bias : nullptr,
                      partial, end - begin, tile + (begin - from) * kLanes, kLanes, nullptr);
      });
    };
    if (rules_.modified) {
      edge(from, to, from < all.first || to > all.last);
    } else {
      const int64_t full = least(most(all.first, from), to), full_end = most(least(all.last, to), full);
      edge(from, full, true);
      edge(full_end, to, true);
    }
  }

  float* const tile_;                     // [kTileKeys][kLanes]: scores, then pairs of probabilities
  BFloat16 *const keys_, *const values_;  // of a chunk, in tiles
  int64_t strip_ = 0;                     // from a tile of values to that of the next 16 dims
};

size_t bf16_forward_scratch(const Problem& p, const Tiling& tiling) { return Bf16Forward::scratch(p, tiling); }

void bf16_forward_task(const ForwardTask& task, const Tiling& tiling, void* scratch) {
  if (Bf16Forward::takes(task)) {
    Bf16Forward(task, tiling, scratch).run();
  } else {
    forward_task<float>(task, tiling, scratch);
  }
}

}  // namespace
}  // namespace flash::cpu
