// common/score_mask.cuh: the values of attn_mask for a fragment of scores, and how they are added.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/modifiers.h"
#include "cuda/common/place.cuh"
#include "cuda/ptx/matrix.cuh"

namespace flash::common {

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

// Of a fragment with kJ blocks of 8 columns at `at`.
template <bool kTransposed, int kJ>
__device__ __forceinline__ MaskPlace mask_place(const problem::Mask& mask, int64_t batch, int64_t head, int64_t rows,
                                                int64_t keys, const Place& at) {
  MaskPlace m;
  m.corner = batch * mask.batch + head * mask.head + at.row * mask.row + at.key * mask.key;
  m.line_stride = kTransposed ? mask.key : mask.row;
  m.column_stride = kTransposed ? mask.row : mask.key;
  m.last_line = narrow((kTransposed ? keys - at.key : rows - at.row) - 1);
  m.last_column = narrow((kTransposed ? rows - at.row : keys - at.key) - 1);
  m.inside = (at.column & ~7) + kJ * 8 - 1 <= m.last_column;
  return m;
}

// Whether columns are dense keys that can be read in pairs. The same for a whole warp.
template <class Element>
__device__ __forceinline__ bool pairs_up(const MaskPlace& m, const Element* corner) {
  return m.inside && m.column_stride == 1 && m.line_stride % 2 == 0 &&
         reinterpret_cast<uint64_t>(corner) % (2 * sizeof(Element)) == 0;
}

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
  const bool pairs = !kTransposed && pairs_up(m, corner);
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

// -inf hides a key whatever its score, NaN too; a NaN in the mask stays. unit: score units per natural unit.
template <class Real>
__device__ __forceinline__ Real masked_score(Real score, Real mask, Real unit) {
  const Real floor = Real(problem::kMaskFloor), sum = mask < floor ? unit * floor : unit * mask + score;
  return mask == -Real(INFINITY) ? -Real(INFINITY) : sum;
}

// T: dtype of the query; a float mask is fp32 or of that type.
template <bool kTransposed, class T, int kI, int kJ>
__device__ __forceinline__ void add_mask(float (&s)[kI][kJ][4], const problem::Mask& mask, int64_t batch, int64_t head,
                                         int64_t rows, int64_t keys, float unit, const Place& at) {
  const MaskPlace m = mask_place<kTransposed, kJ>(mask, batch, head, rows, keys, at);
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

// A mask of the query's 16-bit type, dense along the keys, read before the product that it is added to: the reads travel under it.
template <class T, int kI, int kJ>
class MaskAhead {
 public:
  // Reads where the mask is of that kind.
  __device__ __forceinline__ void read(const problem::Problem& p, const Modifiers& m, int64_t batch, int64_t head, int64_t rows,
                                       int64_t keys, const Place& at) {
    if (!kServes || !(m.flags & kFloatMask) || p.mask.dtype != p.dtype) return;
    const MaskPlace place = mask_place<false, kJ>(p.mask, batch, head, rows, keys, at);
    const T* corner = static_cast<const T*>(p.mask.data) + place.corner;
    here_ = pairs_up(place, corner);
    if (!here_) return;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* line = corner + min(at.line + i * 16 + half * 8, place.last_line) * place.line_stride + at.column;
#pragma unroll
        for (int j = 0; j < kJ; ++j) words_[i][j][half] = __ldg(reinterpret_cast<const uint32_t*>(line + j * 8));
      }
  }

  __device__ __forceinline__ bool here() const { return kServes && here_; }

  __device__ __forceinline__ void add(float (&s)[kI][kJ][4], float unit) const {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Pair<T> pair;
          memcpy(&pair, &words_[i][j][half], sizeof pair);
          s[i][j][2 * half] = masked_score(s[i][j][2 * half], addend(pair.low), unit);
          s[i][j][2 * half + 1] = masked_score(s[i][j][2 * half + 1], addend(pair.high), unit);
        }
  }

 private:
  static constexpr bool kServes = sizeof(T) == 2;
  bool here_ = false;
  uint32_t words_[kServes ? kI : 1][kServes ? kJ : 1][2];
};

}  // namespace flash::common
