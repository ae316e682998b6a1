// cpu/modifiers.h: softcap, ALiBi, mask, dropout and the interval on a tile of scores: passes over a tile that lies in the first-level
// cache. A call without modifiers makes them only where an interval ends.
#pragma once
#include "cpu/rules.h"

namespace flash::cpu {
namespace {

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

// ---- passes over a tile of `keys` rows ----------------------------------------------------------------------------------------
// f(at) is called per vector of lanes; what it returns maps (x, key of the tile) to the new x.
template <class Real, class F>
FLASH_INLINE void each_vector(int vectors, int64_t keys, Real* tile, int64_t stride, const F& f) {
  for (int at = 0; at < vectors * kWidth<Real>; at += kWidth<Real>) {
    const auto map = f(at);
    for (int64_t j = 0; j < keys; ++j) store(tile + j * stride + at, map(load(tile + j * stride + at), j));
  }
}

// Scores become final, -inf where masked. slope (or null) takes the derivative of softcap, [key][kGroup].
template <class Real>
FLASH_STAGE void adjust(const Rules<Real>& rules, const Group<Real>& g, const Bounds<Real>& bounds, const Real* bias,
                        bool partial, int64_t keys, Real* tile, int64_t stride, Real* slope) {
  using V = Vector<Real>;
  const V masked = set(-std::numeric_limits<Real>::infinity());
  if (rules.p.softcap > 0) {
    const V cap = set(static_cast<Real>(rules.p.softcap));
    each_vector(g.vectors, keys, tile, stride, [&](int at) {
      return [=](V x, int64_t j) {
        const V t = tanh(x);
        if (slope) store(slope + j * kGroup<Real> + at, set(Real(1)) - t * t);
        return t * cap;
      };
    });
  }
  if (rules.p.alibi_slopes)
    each_vector(g.vectors, keys, tile, stride, [&](int at) {
      const V diagonal = load(bounds.diagonal + at), steep = load(g.slope + at);
      return [=](V x, int64_t j) {
        const V distance = diagonal - set(static_cast<Real>(j));
        return x - steep * max(distance, -distance);
      };
    });
  if (bias) {
    const V floor = set(static_cast<Real>(problem::kMaskFloor));
    each_vector(g.vectors, keys, tile, stride, [&](int at) {
      return [=](V x, int64_t j) {
        const V add = load(bias + j * kGroup<Real> + at);
        return add == masked ? masked : add < floor ? floor : x + add;
      };
    });
  }
  if (partial)
    each_vector(g.vectors, keys, tile, stride, [&](int at) {
      const V first = load(bounds.first + at), last = load(bounds.last + at);
      return [=](V x, int64_t j) {
        const V key = set(static_cast<Real>(j));
        return (first <= key) & (key <= last) ? x : masked;
      };
    });
}

// largest takes in the scores of a tile.
template <class Real>
FLASH_STAGE void take_largest(int vectors, int64_t keys, const Real* tile, Real* largest) {
  for (int at = 0; at < vectors * kWidth<Real>; at += kWidth<Real>) {
    Vector<Real> top = load(largest + at);
    for (int64_t j = 0; j < keys; ++j) top = max(load(tile + j * kGroup<Real> + at), top);
    store(largest + at, top);
  }
}

// Probabilities after dropout.
template <class Real>
FLASH_STAGE void drop(int vectors, const Real* factor, int64_t keys, Real* tile) {
  each_vector(vectors, keys, tile, kGroup<Real>,
              [&](int at) { return [=](Vector<Real> x, int64_t j) { return x * load(factor + j * kGroup<Real> + at); }; });
}

}  // namespace
}  // namespace flash::cpu
