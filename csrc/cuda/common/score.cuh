// common/score.cuh: what acts on single scores between S = Q K^T and the softmax, and dropout after it, on fragments in registers.
// Used by forward (lines of the accumulator are rows, columns are keys) and by backward's S^T (kTransposed: lines are keys).
// Scores stay in the units of the product: modifiers are added divided by the scale, so that the exponential's multiply-add
// still does the scaling. Every branch is uniform over the block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/layout.cuh"
#include "cuda/tile/reduce.cuh"
#include "problem/mask.h"
#include "problem/philox.h"
#include "problem/problem.h"

namespace flash::common {

inline constexpr float kLog2e = 1.44269504088896341f;

enum : uint32_t {
  kScaleFirst = 1,  // the scale is not a positive number to divide by: scores are multiplied before anything is added
  kSoftcap = 2,
  kAlibi = 4,
  kFloatMask = 8,
  kBoolMask = 16,
  kDropout = 32,
  kChangesScore = kScaleFirst | kSoftcap | kAlibi | kFloatMask | kBoolMask,
};

// What a Problem asks of single scores, in the kernel's types. Written by the host.
struct Modifiers {
  uint32_t flags = 0;
  float scale = 0;  // of q . k
  float softcap = 0;
  float keep_scale = 1;  // 1 / (1 - dropout_p), 0 where everything is dropped
};

inline Modifiers modifiers(const problem::Problem& p) {
  Modifiers m;
  m.scale = static_cast<float>(p.scale);
  m.softcap = static_cast<float>(p.softcap);
  m.keep_scale = p.dropout_p < 1 ? static_cast<float>(1 / (1 - p.dropout_p)) : 0.f;
  if (p.softcap > 0) m.flags |= kSoftcap;
  if (!(p.softcap > 0) && !(m.scale >= 1e-20f && m.scale <= 1e20f)) m.flags |= kScaleFirst;
  if (p.alibi_slopes != nullptr) m.flags |= kAlibi;
  if (p.mask.data != nullptr) m.flags |= p.mask.dtype == problem::DType::kBool ? kBoolMask : kFloatMask;
  if (p.dropout_p > 0) m.flags |= kDropout;
  return m;
}

// Where a fragment lies. Element [i][j][e] of this lane is line `line` + 16 i + 8 (e / 2), column `column` + 8 j + e % 2 of a tile
// whose corner is (row, key) of the sequence. The corner is the same for all threads of a block.
struct Place {
  int64_t row, key;
  int line, column;
  __device__ __forceinline__ Place(int64_t row, int64_t key, int first_line, int first_column, int lane)
      : row(row), key(key), line(first_line + tile::lane_line(lane)), column(first_column + tile::lane_column(lane)) {}
};

__device__ __forceinline__ int narrow(int64_t x) {  // far values stay far
  constexpr int64_t kFar = 1 << 29;
  return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
}

// Hides what the interval does not show, and rows (transposed only) and keys past the end.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void hide(float (&s)[kI][kJ][4], const problem::Interval& interval, int64_t rows, const Place& at,
                                     float hidden = -INFINITY) {
  const int64_t corner = at.key - at.row - interval.diagonal;  // key - row, measured from the diagonal
  const int above = narrow(kTransposed ? corner + interval.left : interval.right - corner);   // column <= line + above
  const int below = narrow(kTransposed ? corner - interval.right : -interval.left - corner);  // column >= line + below
  const int columns = narrow(kTransposed ? rows - at.row : interval.keys - at.key);
  const int lines = narrow(kTransposed ? interval.keys - at.key : rows - at.row);
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = at.line + i * 16 + half * 8;
      int last = min(line + above, columns - 1) - at.column;
      const int first = line + below - at.column;
      if (kTransposed && line >= lines) last = -1;
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int f = 0; f < 2; ++f)
          if (j * 8 + f > last || j * 8 + f < first) s[i][j][2 * half + f] = hidden;
    }
}

// tanh to the accuracy that T needs.
template <class T>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 2) {
    return fmaf(-2.f, ptx::reciprocal(ptx::exp2(x * (2 * kLog2e)) + 1.f), 1.f);
  } else {
    return tanhf(x);
  }
}

// First step: softcap (scores become tanh, in [-1, 1]) or a scale that cannot be folded.
// Returns log2 units per unit of the scores that leave.
template <class T, int kI, int kJ>
__device__ __forceinline__ float cap(float (&s)[kI][kJ][4], const Modifiers& m) {
  if (!(m.flags & (kSoftcap | kScaleFirst))) return m.scale * kLog2e;
  const bool capped = m.flags & kSoftcap;
  const float factor = capped ? m.scale / m.softcap : m.scale;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] *= factor;
  if (!capped) return kLog2e;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = tanh_of<T>(s[i][j][e]);
  return m.softcap * kLog2e;
}

// -slope |row + diagonal - key|; slope in units of the scores. Distances are exact up to 2^24.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void add_alibi(float (&s)[kI][kJ][4], float slope, int64_t diagonal, const Place& at) {
  const int64_t corner = kTransposed ? at.key - at.row - diagonal : at.row + diagonal - at.key;  // |line + corner - column|
  const int base = narrow(corner) + at.line - at.column;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float distance = static_cast<float>(base + i * 16 + half * 8);
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float& x = s[i][j][2 * half + f];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(j * 8 + f)), x);
        }
    }
}

// Values of a mask as what is added to a score in natural units.
__device__ __forceinline__ float addend(float x) { return x; }
__device__ __forceinline__ float addend(__half x) { return __half2float(x); }
__device__ __forceinline__ float addend(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float addend(bool keep) { return keep ? 0.f : -INFINITY; }

// Two neighbours in one read.
template <class Element>
struct alignas(2 * sizeof(Element)) Pair {
  Element low, high;
};
template <class Element>
__device__ __forceinline__ Pair<Element> read_pair(const Element* p) {
  Pair<Element> pair;
  if constexpr (sizeof(Element) == 4) {
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(p));
    memcpy(&pair, &bits, sizeof pair);
  } else if constexpr (sizeof(Element) == 2) {
    const uint32_t bits = __ldg(reinterpret_cast<const uint32_t*>(p));
    memcpy(&pair, &bits, sizeof pair);
  } else {
    const uint16_t bits = __ldg(reinterpret_cast<const uint16_t*>(p));
    pair = {(bits & 255) != 0, bits >> 8 != 0};
  }
  return pair;
}
template <class Element>
__device__ __forceinline__ Element read_one(const Element* p) {
  if constexpr (sizeof(Element) == 1) {
    return __ldg(reinterpret_cast<const uint8_t*>(p)) != 0;
  } else {
    return __ldg(p);
  }
}

// Where a fragment's mask lies: the corner of its tile, and strides in elements along the lines and columns of the fragment.
struct MaskPlace {
  int64_t corner, line_stride, column_stride;
  int last_line, last_column;  // that exist, from the corner
  bool inside;                 // no column of the fragment lies beyond
};

// Whether lines are dense keys that can be read in pairs. The same for a whole warp.
template <bool kTransposed, int kI, class Element>
__device__ __forceinline__ bool transposes(const MaskPlace& m, const Element* corner, const Place& at) {
  return kTransposed && m.line_stride == 1 && m.column_stride != 0 && m.column_stride % 2 == 0 &&
         reinterpret_cast<uint64_t>(corner) % 4 == 0 && (at.line & ~7) + kI * 16 - 1 <= m.last_line;
}

// The mask's values for a fragment, all reads under way at once. What lies past the end gets the value of the last line or column: it
// is hidden afterwards (a tile that reaches past the end is PARTIAL) or never stored.
template <bool kTransposed, class Element, int kI, int kJ>
__device__ __forceinline__ void read_mask(float (&v)[kI][kJ][4], const void* data, const MaskPlace& m, const Place& at) {
  const Element* corner = static_cast<const Element*>(data) + m.corner;
  // Columns that are keys are mostly dense; columns that are rows are mostly broadcast, or far apart.
  const bool pairs = !kTransposed && m.inside && m.column_stride == 1 && m.line_stride % 2 == 0 &&
                     reinterpret_cast<uint64_t>(corner) % (2 * sizeof(Element)) == 0;
  const auto line = [&](int i, int half) { return corner + min(at.line + i * 16 + half * 8, m.last_line) * m.line_stride; };
  if (pairs) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kJ; ++j) {
          const Pair<Element> pair = read_pair(line(i, half) + at.column + j * 8);
          v[i][j][2 * half] = addend(pair.low);
          v[i][j][2 * half + 1] = addend(pair.high);
        }
  } else if (sizeof(Element) == 2 && transposes<kTransposed, kI>(m, corner, at)) {
    // Dense keys are lines here: pairs of keys are read and 8 x 8 blocks turned, so that a read still brings two elements.
    if constexpr (sizeof(Element) == 2) {
      const int lane = threadIdx.x % 32, first_line = at.line - tile::lane_line(lane) + tile::lane_column(lane);
      const int first_column = at.column - tile::lane_column(lane) + tile::lane_line(lane);
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        const Element* row = corner + min(first_column + j * 8, m.last_column) * m.column_stride + first_line;
#pragma unroll
        for (int i = 0; i < kI; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t bits = ptx::transpose_matrix(__ldg(reinterpret_cast<const uint32_t*>(row + i * 16 + half * 8)));
            Pair<Element> pair;
            memcpy(&pair, &bits, sizeof pair);
            v[i][j][2 * half] = addend(pair.low);
            v[i][j][2 * half + 1] = addend(pair.high);
          }
      }
    }
  } else if (kTransposed && m.column_stride == 0) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float broadcast = addend(read_one(line(i, half)));
#pragma unroll
        for (int j = 0; j < kJ; ++j) v[i][j][2 * half] = v[i][j][2 * half + 1] = broadcast;
      }
  } else {
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const int64_t column = min(at.column + j * 8 + f, m.last_column) * m.column_stride;
#pragma unroll
        for (int i = 0; i < kI; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) v[i][j][2 * half + f] = addend(read_one(line(i, half) + column));
      }
  }
}

// Finite masks below this, such as -FLT_MAX, count as this much and the score beside them is dropped, as it is in an fp32 sum: in log2
// units they would overflow to -inf. Beside a key that is not masked nothing changes. Where all keys of a row are masked so, lse keeps
// the digits that backward and the sum of split keys need.
inline constexpr float kMaskFloor = -1e5f;

// -inf hides a key whatever its score, NaN too; a NaN in the mask stays. unit: score units per natural unit.
template <class Real>
__device__ __forceinline__ Real masked_score(Real score, Real mask, Real unit) {
  const Real sum = mask < Real(kMaskFloor) ? unit * Real(kMaskFloor) : unit * mask + score;
  return mask == -Real(INFINITY) ? -Real(INFINITY) : sum;
}

// T: dtype of the query; a float mask is fp32 or of that type.
template <bool kTransposed, class T, int kI, int kJ>
__device__ __forceinline__ void add_mask(float (&s)[kI][kJ][4], const problem::Mask& mask, int64_t batch, int64_t head,
                                         int64_t rows, int64_t keys, float unit, const Place& at) {
  MaskPlace m;
  m.corner = batch * mask.batch + head * mask.head + at.row * mask.row + at.key * mask.key;
  m.line_stride = kTransposed ? mask.key : mask.row;
  m.column_stride = kTransposed ? mask.row : mask.key;
  m.last_line = narrow((kTransposed ? keys - at.key : rows - at.row) - 1);
  m.last_column = narrow((kTransposed ? rows - at.row : keys - at.key) - 1);
  m.inside = (at.column & ~7) + kJ * 8 - 1 <= m.last_column;
  float v[kI][kJ][4];
  if (mask.dtype == problem::DType::kBool) {
    read_mask<kTransposed, bool>(v, mask.data, m, at);
  } else if (sizeof(T) != 2 || mask.dtype == problem::DType::kFloat32) {
    read_mask<kTransposed, float>(v, mask.data, m, at);
  } else if constexpr (sizeof(T) == 2) {
    read_mask<kTransposed, T>(v, mask.data, m, at);
  }
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int j = 0; j < kJ; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = masked_score(s[i][j][e], v[i][j][e], unit);
}

// Second step: ALiBi, then the mask, in units of scores of which one is `log2_scale` log2 units. T: dtype of the query.
template <bool kTransposed, class T, int kI, int kJ>
__device__ __forceinline__ void add_modifiers(float (&s)[kI][kJ][4], const problem::Problem& p, const Modifiers& m,
                                              int64_t batch, int64_t head, int64_t rows, const problem::Interval& interval,
                                              const Place& at, float log2_scale) {
  const float unit = kLog2e / log2_scale;
  if (m.flags & kAlibi) {
    const float slope = static_cast<const float*>(p.alibi_slopes)[batch * p.alibi_batch + head];
    add_alibi<kTransposed>(s, slope * unit, interval.diagonal, at);
  }
  if (m.flags & (kFloatMask | kBoolMask)) add_mask<kTransposed, T>(s, p.mask, batch, head, rows, interval.keys, unit, at);
}

// Both steps. Returns log2 units per unit of the scores that leave.
template <bool kTransposed, class T, int kI, int kJ>
__device__ __forceinline__ float modify(float (&s)[kI][kJ][4], const problem::Problem& p, const Modifiers& m, int64_t batch,
                                        int64_t head, int64_t rows, const problem::Interval& interval, const Place& at) {
  const float log2_scale = cap<T>(s, m);
  add_modifiers<kTransposed, T>(s, p, m, batch, head, rows, interval, at, log2_scale);
  return log2_scale;
}

// Calls use(i, j, e, kept) for every element of a fragment whose first line and column are multiples of 16.
// Forward: one Philox call serves the lane's 8 elements of a 16 x 16 patch. Transposed: those 8 belong to two other lanes, one for
// each parity of the row; their words come by shuffles, so whole warps must call this.
template <bool kTransposed, int kI, int kJ, class Use>
__device__ __forceinline__ void for_dropout(const problem::Dropout& dropout, int64_t plane, const Place& at, int lane,
                                            Use use) {
  const int64_t line_patch = ((kTransposed ? at.key : at.row) >> 4) + (at.line >> 4);
  const int64_t column_patch = ((kTransposed ? at.row : at.key) >> 4) + (at.column >> 4);
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int t = 0; t < kJ / 2; ++t) {
      if constexpr (!kTransposed) {
        const problem::Philox r = dropout.draw(plane, line_patch + i, column_patch + t, lane);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          use(i, 2 * t + w / 2, 2 * (w % 2), (r.word[w] & 0xffffu) < dropout.keep);
          use(i, 2 * t + w / 2, 2 * (w % 2) + 1, (r.word[w] >> 16) < dropout.keep);
        }
      } else {
        const problem::Philox r = dropout.draw(plane, column_patch + t, line_patch + i, lane);
        const int key = tile::lane_line(lane), row = tile::lane_column(lane);  // inside an 8 x 8 quarter
#pragma unroll
        for (int f = 0; f < 2; ++f)
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t word = __shfl_sync(tile::kWarp, r.word[w], (row + f) * 4 + key / 2);
            use(i, 2 * t + w % 2, 2 * (w / 2) + f, ((key & 1) ? word >> 16 : word & 0xffffu) < dropout.keep);
          }
      }
    }
}

// Probabilities after the softmax sum: dropped ones become 0.
template <bool kTransposed, int kI, int kJ>
__device__ __forceinline__ void drop(float (&p)[kI][kJ][4], const problem::Dropout& dropout, int64_t plane, const Place& at,
                                     int lane) {
  for_dropout<kTransposed, kI, kJ>(dropout, plane, at, lane, [&](int i, int j, int e, bool kept) {
    if (!kept) p[i][j][e] = 0;
  });
}

}  // namespace flash::common
