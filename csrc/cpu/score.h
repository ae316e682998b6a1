// cpu/score.h: what happens to a tile of scores between the two products, forward and backward. A call without modifiers
// (softcap, ALiBi, mask, dropout) skips all of it on blocks that every row sees.
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

// A tile holds query . key times query_factor. The score is `scale` times that, unless `modified`: then adjusted() makes it the
// score, and `scale` is 1. `unit` brings what the tile holds to log2 units.
template <class Real>
struct Rules {
  const Problem& p;
  Real query_factor = 1, scale = 1, unit, lowest;
  Real cap_in = 0, cap_out = 0;  // softcap: cap_out * tanh(cap_in * tile)
  Real to_score = 1;             // without softcap: the score before ALiBi and mask
  bool modified;
  bool dropped;
  problem::Dropout dropout{};
  Real survivor = 1;  // 1 / (1 - dropout_p)

  explicit Rules(const Problem& problem) : p(problem) {
    const Real whole = static_cast<Real>(p.scale), size = whole < 0 ? -whole : whole;
    if (size > Real(1e-30)) {  // the sign goes into the queries: the largest of the tile is then the largest score
      query_factor = whole < 0 ? -1 : 1;
      to_score = size;
    } else {
      query_factor = whole;
    }
    modified = p.softcap > 0 || p.alibi_slopes != nullptr || p.mask.data != nullptr;
    scale = modified ? Real(1) : to_score;
    unit = scale * problem::Softmax<Real>::kLog2e;
    lowest = lowest_of(unit);
    if (p.softcap > 0) {
      cap_in = to_score / static_cast<Real>(p.softcap);
      cap_out = static_cast<Real>(p.softcap);
    }
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
  for (int i = 0; i < kGroup<Real>; ++i) {
    const int64_t lane = begin + (i < g.lanes ? i : g.lanes - 1);
    const int64_t row = lane / heads, head = kv_head * heads + lane % heads;
    g.row[i] = row;
    g.head[i] = head;
    g.slope[i] = p.alibi_slopes ? static_cast<const Real*>(p.alibi_slopes)[s.batch * p.alibi_batch + head] : Real(0);
    g.mask[i] = s.batch * p.mask.batch + head * p.mask.head + row * p.mask.row;
  }
}

// ---- tiles read or drawn: [key][lane] -------------------------------------------------------------------------------------------
template <class Real, class T>
void mask_tile_of(const Problem& p, const Group<Real>& g, int64_t key, int64_t keys, Real* bias) {
  const T* data = static_cast<const T*>(p.mask.data);
  if constexpr (sizeof(T) == sizeof(Real) || sizeof(T) == 1 || (sizeof(T) == 2 && sizeof(Real) == 4)) {
    if (p.mask.key == 1) {
      const T* rows[kGroup<Real>];
      for (int i = 0; i < kGroup<Real>; ++i) rows[i] = data + g.mask[i] + key;
      return pack<Real, T>(rows, 0, keys, g.vectors, 1, bias);
    }
  }
  for (int i = 0; i < g.vectors * kWidth<Real>; ++i)
    for (int64_t j = 0; j < keys; ++j)
      bias[j * kGroup<Real> + i] = static_cast<Real>(widen(data[g.mask[i] + (key + j) * p.mask.key]));
}

// What the mask adds.
template <class Real>
void mask_tile(const Problem& p, const Group<Real>& g, int64_t key, int64_t keys, Real* bias) {
  switch (p.mask.dtype) {
    case DType::kBool:
      return mask_tile_of<Real, Bool>(p, g, key, keys, bias);
    case DType::kFloat32:
      return mask_tile_of<Real, float>(p, g, key, keys, bias);
    case DType::kFloat64:
      return mask_tile_of<Real, double>(p, g, key, keys, bias);
    case DType::kBFloat16:
      return mask_tile_of<Real, BFloat16>(p, g, key, keys, bias);
    default:
      return mask_tile_of<Real, Float16>(p, g, key, keys, bias);
  }
}

// Dropout::draw of philox.h for a vector of lanes.
FLASH_INLINE void draw(const problem::Dropout& dropout, Words plane, Words row_patch, Words column, Words (&word)[4]) {
  Words c0 = column, c1 = row_patch, c2 = plane, c3 = Words{} + dropout.stream;
  uint32_t k0 = static_cast<uint32_t>(dropout.key), k1 = static_cast<uint32_t>(dropout.key >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    Words low_a, high_a, low_b, high_b;
    multiply(c0, 0xD2511F53u, &low_a, &high_a);
    multiply(c2, 0xCD9E8D57u, &low_b, &high_b);
    c0 = high_b ^ c1 ^ k0;
    c2 = high_a ^ c3 ^ k1;
    c1 = low_b;
    c3 = low_a;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// What dropout multiplies probabilities by. A draw holds 4 of the 16 columns of a patch for a row.
template <class Real>
FLASH_STAGE void dropout_tile(const Rules<Real>& rules, const Group<Real>& g, int64_t batch, int64_t key, int64_t keys,
                              Real* factor) {
  constexpr int W = kVectorBytes / 4, N = kGroup<Real>;
  const problem::Dropout dropout = rules.dropout;
  const Real survivor = rules.survivor;
  for (int first_lane = 0; first_lane < g.vectors * kWidth<Real>; first_lane += W) {
    Words plane{}, row_patch{}, lane{}, lower{};
    const int live = N - first_lane < W ? N - first_lane : W;
    for (int i = 0; i < live; ++i) {
      const int64_t row = g.row[first_lane + i];
      plane[i] = static_cast<uint32_t>(batch * rules.p.heads + g.head[first_lane + i]);
      row_patch[i] = static_cast<uint32_t>(row >> 4);
      lane[i] = problem::Dropout::lane_of(row, 0);
      lower[i] = row & 8 ? ~0u : 0u;
    }
    for (int64_t column = key / 16 * 16; column < key + keys; column += 16)
      for (uint32_t pair = 0; pair < 4; ++pair) {
        Words word[4];
        draw(dropout, plane, row_patch, lane + (static_cast<uint32_t>(column / 16) * 32u + pair), word);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int64_t j = column + 2 * pair + (i & 1) + (i >> 1) * 8 - key;
          if (j < 0 || j >= keys) continue;
          Words bits = (word[i & 2] & ~lower) | (word[(i & 2) + 1] & lower);
          bits = i & 1 ? bits >> 16 : bits & 0xffffu;
          Real* to = factor + j * N + first_lane;
          if constexpr (sizeof(Real) == 4) {
            store(to, (Types<float>::Int)bits < static_cast<int32_t>(dropout.keep) ? set(survivor) : Vector<Real>{});
          } else {
            for (int l = 0; l < live; ++l) to[l] = bits[l] < dropout.keep ? survivor : Real(0);
          }
        }
      }
  }
}

// ---- single vectors -------------------------------------------------------------------------------------------------------------
FLASH_INLINE Vector<double> tanh(Vector<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}
FLASH_INLINE Vector<float> tanh(Vector<float> x) {
  const auto size = x < 0.0f ? -x : x;
  Vector<float> e[1] = {size * -2.0f};
  exp<float, 1>(e);
  const auto far = (1.0f - e[0]) / (1.0f + e[0]);
  // Taylor series below 1/2, where 1 - e would cancel.
  constexpr float kTerms[] = {21844.0f / 6081075, -1382.0f / 155925, 62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3};
  const auto square = x * x;
  auto near = set(kTerms[0]);
  for (int i = 1; i < 6; ++i) near = fma(near, square, set(kTerms[i]));
  near = fma(near * square, x, x);
  return size < 0.5f ? near : x < 0.0f ? -far : far;
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

// Finite masks below this, such as -FLT_MAX, count as this much and the score beside them is dropped, as it is in an fp32 sum: in log2
// units they would overflow to -inf, and lse keeps the digits that backward needs.
inline constexpr double kMaskFloor = -1e5;

// One vector of scores, -inf where masked. `capped` is the tanh of softcap.
template <class Real>
FLASH_INLINE Vector<Real> adjusted(const Rules<Real>& rules, const Group<Real>& g, const Bounds<Real>& bounds, int at,
                                   int64_t j, const Real* bias, bool partial, Vector<Real> x, Vector<Real>* capped) {
  const Vector<Real> masked = set(-std::numeric_limits<Real>::infinity()), floor = set(static_cast<Real>(kMaskFloor));
  const Vector<Real> key = set(static_cast<Real>(j));
  if (rules.modified) {
    if (rules.cap_out > 0) {
      *capped = tanh(x * set(rules.cap_in));
      x = *capped * set(rules.cap_out);
    } else {
      x *= set(rules.to_score);
    }
    if (rules.p.alibi_slopes) {
      const Vector<Real> distance = load(bounds.diagonal + at) - key;
      x -= load(g.slope + at) * (distance < 0 ? -distance : distance);
    }
    if (bias) {
      const Vector<Real> add = load(bias + j * kGroup<Real> + at);
      x = add == masked ? masked : add < floor ? floor : x + add;
    }
  }
  if (partial) x = (load(bounds.first + at) <= key) & (key <= load(bounds.last + at)) ? x : masked;
  return x;
}

constexpr int kChains = kRegisters == 32 ? 8 : 4;  // exponentials at a time

// ---- passes over a tile of `keys` rows ----------------------------------------------------------------------------------------
// Scores become final; largest takes them in.
template <class Real, int NV>
FLASH_STAGE void adjust(const Rules<Real>& rules, const Group<Real>& g, const Bounds<Real>& bounds, const Real* bias,
                        bool partial, int64_t keys, Real* tile, Real* largest) {
  Vector<Real> capped;
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const int at = v * kWidth<Real>;
      Real* to = tile + j * kGroup<Real> + at;
      const Vector<Real> x = adjusted(rules, g, bounds, at, j, bias, partial, load(to), &capped);
      store(to, x);
      store(largest + at, max(x, load(largest + at)));
    }
}

// Scores become probabilities relative to the new maximum `after`; sum takes them in; factor is what earlier results shrink by.
// Returns whether some lane's maximum moved.
template <class Real, int NV>
FLASH_STAGE bool exponentiate(Real unit, Real lowest, Real* tile, int64_t keys, Real* before, const Real* after, Real* sum,
                              Real* factor) {
  const Vector<Real> none = set(-std::numeric_limits<Real>::infinity()), c = set(unit), low = set(lowest);
  bool moved = false;
  for (int v = 0; v < NV; ++v) {
    const int at = v * kWidth<Real>;
    const Vector<Real> old = load(before + at), now = load(after + at);
    const Vector<Real> top = now == none ? Vector<Real>{} : now;  // Softmax::reference
    const auto same = old == now;
    moved |= any(~same);
    const Vector<Real> shrink = same ? set(Real(1)) : exp2<Real>(old - top, c, low);
    store(factor + at, shrink);
    store(before + at, now);
    Vector<Real> sums[2] = {};
    by_rows<kChains>(0, keys, [&](auto count, int64_t j) FLASH_LAMBDA {
      constexpr int N = decltype(count)::value;
      Real* to = tile + j * kGroup<Real> + at;
      Vector<Real> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = load(to + i * kGroup<Real>) - top;
      exp2<Real, N>(x, c, low);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        store(to + i * kGroup<Real>, x[i]);
        sums[i & 1] += x[i];
      }
    });
    store(sum + at, fma(load(sum + at), shrink, sums[0] + sums[1]));
  }
  return moved;
}

template <class Real, int NV>
FLASH_STAGE void drop(const Real* factor, int64_t keys, Real* tile) {
  for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * kGroup<Real> + v * kWidth<Real>;
      store(tile + at, load(tile + at) * load(factor + at));
    }
}

// Backward. In: tile = scores as the product left them, gradient = d loss / d P. Out: tile = P after dropout, gradient = that of
// query . key (chain) or of the score after softcap (else), both 0 where masked. lse: +inf for rows that saw nothing.
// P = exp(score - lse), not 2^(log2 units): the difference is small where P matters, and so is its rounding error.
template <class Real, int NV>
FLASH_STAGE void differentiate(const Rules<Real>& rules, const Group<Real>& g, const Bounds<Real>& bounds, const Real* bias,
                               const Real* keep, bool partial, bool chain, int64_t keys, Real* tile, Real* gradient,
                               int64_t stride, const Real* lse, const Real* delta) {
  const Vector<Real> masked = set(-std::numeric_limits<Real>::infinity());
  for (int64_t j = 0; j < keys; ++j, tile += stride, gradient += stride)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const int at = v * kWidth<Real>;
      Vector<Real> capped = {}, x = load(tile + at), dp = load(gradient + at);
      x = adjusted(rules, g, bounds, at, j, bias, partial, x, &capped);
      Vector<Real> p[1] = {fma(x, set(rules.scale), -load(lse + at))};
      exp<Real, 1>(p);
      Vector<Real> kept = p[0];
      if (keep) {
        const Vector<Real> factor = load(keep + j * kGroup<Real> + at);
        kept *= factor;
        dp *= factor;
      }
      Vector<Real> ds = p[0] * (dp - load(delta + at));
      if (chain && rules.cap_out > 0) ds *= set(Real(1)) - capped * capped;
      store(tile + at, kept);
      store(gradient + at, x == masked ? Vector<Real>{} : ds);
    }
}

// The same without modifiers on a block that every lane sees.
template <class Real, int NV>
FLASH_STAGE void differentiate_plain(Real scale, int64_t keys, Real* tile, Real* gradient, int64_t stride, const Real* lse,
                                     const Real* delta) {
  for (int v = 0; v < NV; ++v) {
    const int at = v * kWidth<Real>;
    const Vector<Real> l = load(lse + at), d = load(delta + at);
    by_rows<kChains>(0, keys, [&](auto count, int64_t j) FLASH_LAMBDA {
      constexpr int N = decltype(count)::value;
      Real *p = tile + j * stride + at, *ds = gradient + j * stride + at;
      Vector<Real> x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) x[i] = fma(load(p + i * stride), set(scale), -l);
      exp<Real, N>(x);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        store(p + i * stride, x[i]);
        store(ds + i * stride, x[i] * (load(ds + i * stride) - d));
      }
    });
  }
}

}  // namespace
}  // namespace flash::cpu
