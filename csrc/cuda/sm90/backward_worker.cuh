// sm90/backward_worker.cuh: what the warpgroups that compute have in common: places in the rings, tiles, weights of scores.
#pragma once
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/panels.cuh"
#include "problem/softmax.h"

namespace flash::sm90 {

// Two elements of a register as floats.
__device__ __forceinline__ float2 unpack(uint32_t x, __nv_bfloat16) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t x, __half) { return __half22float2(reinterpret_cast<const __half2&>(x)); }

// bfloat16 is the upper half of a float, so P is cut off for the products and what that takes away is kept: dS comes from P as good as
// in fp32, in fewer registers and with few instructions of the pipe that packs. P is raised before by what cutting off takes away on
// average (kRaise in backward.cu): less than a unit in the last place, so a P that is a bfloat16 number stays exact in dV. dS keeps the
// raise, and the factor of dQ and dK takes it back.
__device__ __forceinline__ uint32_t upper_halves(float low, float high) {
  return ptx::permute_bytes<0x7632>(__float_as_uint(low), __float_as_uint(high));
}

// A byte for each of four.
__device__ __forceinline__ uint32_t rests(const float* x) {
  const uint32_t low = ptx::permute_bytes<0x51>(__float_as_uint(x[0]), __float_as_uint(x[1]));
  const uint32_t high = ptx::permute_bytes<0x51>(__float_as_uint(x[2]), __float_as_uint(x[3]));
  return ptx::permute_bytes<0x5410>(low, high);
}
// x[0..3] *= the P that `operand` (two registers) and `rest` hold.
__device__ __forceinline__ void multiply_by(float* x, const uint32_t* operand, uint32_t rest) {
  x[0] *= __uint_as_float(ptx::permute_bytes<0x1044>(operand[0], rest));
  x[1] *= __uint_as_float(ptx::permute_bytes<0x3255>(operand[0], rest));
  x[2] *= __uint_as_float(ptx::permute_bytes<0x1066>(operand[1], rest));
  x[3] *= __uint_as_float(ptx::permute_bytes<0x3277>(operand[1], rest));
}

// x[0..3] *= the P that `operand` (two registers) holds, in the middle of the numbers that are cut off to it; 0 stays 0.
__device__ __forceinline__ void multiply_by_middle(float* x, const uint32_t* operand) {
  x[0] = ptx::multiply_flushed(x[0], __uint_as_float(ptx::permute_bytes<0x1054>(operand[0], 0x8000u)));
  x[1] = ptx::multiply_flushed(x[1], __uint_as_float(ptx::permute_bytes<0x3254>(operand[0], 0x8000u)));
  x[2] = ptx::multiply_flushed(x[2], __uint_as_float(ptx::permute_bytes<0x1054>(operand[1], 0x8000u)));
  x[3] = ptx::multiply_flushed(x[3], __uint_as_float(ptx::permute_bytes<0x3254>(operand[1], 0x8000u)));
}

// Between warpgroups: P is less than 2, so the upper two bits of the float are 0, and the 16 behind hold two more of the mantissa than
// bfloat16 does.
__device__ __forceinline__ uint32_t dense_halves(float low, float high) {
  return ptx::permute_bytes<0x7632>(__float_as_uint(low) << 2, __float_as_uint(high) << 2);
}
// x[0..1] *= the P of dense_halves(), and half a unit of what was cut off; of x[1], the bits of x[0], about 0.9 units. 0 stays 0.
__device__ __forceinline__ void multiply_by_dense_halves(float* x, uint32_t halves, uint32_t unit) {
  x[0] = ptx::multiply_flushed(x[0], __uint_as_float(ptx::multiply_add(halves, unit, 0x8000u) >> 2));
  x[1] = ptx::multiply_flushed(x[1], __uint_as_float(halves >> 2));
}

// x[0..1] *= the two elements of `weights`.
template <class T>
__device__ __forceinline__ void multiply_by(float* x, uint32_t weights) {
  const float2 two = unpack(weights, T());
  x[0] *= two.x;
  x[1] *= two.y;
}

// A ring that also knows its stage in a uniform register, for descriptors. See BackwardConfig::kUniform.
template <int kStages, bool kUniform>
struct PlacedRing : Ring<kStages> {
  uint32_t held = 0;
  __device__ __forceinline__ uint32_t place() const { return kUniform ? this->stage : held; }
  __device__ __forceinline__ void next() {
    Ring<kStages>::next();
    if constexpr (!kUniform) held = ptx::uniform(this->stage);
  }
};

template <class C>
struct BackwardWorker {
  const BackwardArguments& p;
  const uint32_t base;
  const BackwardBarriers<C> barriers;
  const int warp = (threadIdx.x >> 5) & 3;  // in the warpgroup
  const int lane = threadIdx.x & 31;
  PlacedRing<C::kQueries, C::kUniform> query;
  PlacedRing<C::kGradients, C::kUniform> gradient;
  PlacedRing<C::kKeyStages, C::kUniform> key;
  Ring<C::kScores> score_slot;
  Ring<C::kSlots> slot;

  __device__ __forceinline__ BackwardWorker(const BackwardArguments& p, uint32_t base)
      : p(p), base(bound(base)), barriers{this->base + C::kBarriersAt} {}

  // A stage for a descriptor; a bound of a loop. See C::kUniform.
  static __device__ __forceinline__ uint32_t place(int stage) { return C::kUniform ? stage : ptx::uniform(stage); }
  static __device__ __forceinline__ int bound(int x) { return C::kUniform ? ptx::uniform(x) : x; }
  static __device__ __forceinline__ Steps bound(const Steps& x) { return {bound(x.first), bound(x.last)}; }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::arrive(barrier);
  }

  // The next announced tile; false: there is none. It stays until release_work(), by every lane.
  __device__ __forceinline__ bool fetch(BackwardSlot& tile) {
    ptx::wait(barriers.work_full(slot.stage), slot.parity);
    tile = BackwardSlot{base + C::kWorkAt + C::kWorkBytes * slot.stage};
    slot.next();
    return bound(ptx::load_shared_volatile(tile.index())) < p.tiles;
  }
  __device__ __forceinline__ void release_work(BackwardSlot tile) {
    ptx::arrive(barriers.work_empty((tile.at - base - C::kWorkAt) / C::kWorkBytes));
  }

  // K-major descriptors of a stage's rows.
  __device__ __forceinline__ uint64_t describe_query() const {
    return ptx::describe_matrix(base + C::kQueryAt + query.place() * C::kRowBytes, 16, 1024);
  }
  __device__ __forceinline__ uint64_t describe_gradient() const {
    return ptx::describe_matrix(base + C::kGradientAt + gradient.place() * C::kRowBytes, 16, 1024);
  }
  // The same as B operands with rows along K.
  __device__ __forceinline__ uint64_t describe_query_columns(uint32_t stage) const {
    return ptx::describe_matrix(base + C::kQueryAt + stage * C::kRowBytes, C::kRowPanel, 1024);
  }
  __device__ __forceinline__ uint64_t describe_gradient_columns(uint32_t stage) const {
    return ptx::describe_matrix(base + C::kGradientAt + stage * C::kRowBytes, C::kRowPanel, 1024);
  }
  static constexpr int kLse = 0, kDelta = 1, kSlopes = C::kCapped ? C::kRows / 4 : 1;
  // lse or delta of the rows of a stage of Q.
  __device__ __forceinline__ uint64_t describe_statistics(int which) const {
    return ptx::describe_groups(base + C::kStatisticsAt + query.place() * C::kStatisticsBytes + which * 128, 0, 256);
  }

  // score [64 keys, rows] (+)= statistics of the current stage of Q: one step of a product, against rows of factors.
  template <int kAccumulate>
  __device__ __forceinline__ void add_statistics(float (&score)[C::kRows / 2], int which) const {
    ptx::multiply_async<typename C::T, kAccumulate>(score, ptx::describe_groups(base + C::kOnesAt, 128, 0),
                                                    describe_statistics(which));
  }

  // score = a b^T + statistics, as one batch. Without lse where the scores are capped first.
  template <int kStatistics>
  __device__ __forceinline__ void multiply(float (&score)[C::kRows / 2], uint64_t a, uint64_t b) const {
    constexpr bool kAdds = kStatistics == kDelta || !C::kCapped;
    if constexpr (kAdds) add_statistics<0>(score, kStatistics);
    multiply_panels<typename C::T, C::kDim, C::kKeyPanel, C::kRowPanel, kAdds>(score, a, b);
    ptx::commit_products();
  }

  // score = S -> P, all products of this warpgroup done or, where nothing is capped, at least S. slope: of the cap, times P.
  __device__ __forceinline__ void exponentiate(float (&score)[C::kRows / 2], uint32_t (&slope)[kSlopes], BackwardSlot tile,
                                               int offset, int m, const Steps& full) const {
    if constexpr (C::kCapped) {
      const float unit = p.cap_scale * 2.f * problem::Softmax<float>::kLog2e;
#pragma unroll
      for (int i = 0; i < C::kRows / 4; ++i) {
        float slopes[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float tanh = fmaf(-2.f, ptx::reciprocal(ptx::exp2(score[2 * i + e] * unit) + 1.f), 1.f);
          score[2 * i + e] = tanh * p.scale_log2;
          slopes[e] = fmaf(-tanh, tanh, 1.f);
        }
        slope[i] = ptx::pack(slopes[0], slopes[1], __half());  // in [0, 1]: half is finer than bfloat16
      }
      ptx::fence_products();
      add_statistics<1>(score, kLse);
      ptx::commit_products();
      ptx::wait_products<0>();
    }
    if (!full.contains(m)) mask(score, tile, offset, m);
#pragma unroll
    for (int i = 0; i < C::kRows / 2; ++i) score[i] = ptx::exp2(C::kCapped ? score[i] : score[i] * p.scale_log2);
    if constexpr (C::kCapped) {
#pragma unroll
      for (int i = 0; i < C::kRows / 4; ++i) {
        const float2 slopes = unpack(slope[i], __half());
        slope[i] = ptx::pack(score[2 * i] * slopes.x, score[2 * i + 1] * slopes.y, typename C::T());
      }
    }
  }

  // -inf where a row does not see a key. offset: in the tile, of the warpgroup's 64 keys; m: block of rows.
  __device__ __forceinline__ void mask(float (&score)[C::kRows / 2], BackwardSlot tile, int offset, int m) const {
    const uint4 sequence = ptx::load_shared_16(tile.sequence());
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y);
    const int diagonal = p.bottom_right ? keys - rows : 0, row = m * C::kRows + (lane & 3) * 2;
    const int first = ptx::load_shared_volatile(tile.place()) + offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first + warp * 16 + lane / 4 + 8 * r, seen = key - diagonal;
      const int begin = key < keys ? seen - p.right - row : C::kRows, last = seen + p.left - row;
#pragma unroll
      for (int i = 0; i < C::kRows / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * i + e < begin || 8 * i + e > last) score[4 * i + 2 * r + e] = -INFINITY;
      }
    }
  }

  // kCut: of P where its rests are kept.
  template <bool kCut>
  __device__ __forceinline__ void pack(const float (&score)[C::kRows / 2], uint32_t (&to)[C::kRows / 16][4]) const {
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i)
      to[i / 4][i % 4] =
          kCut ? upper_halves(score[2 * i], score[2 * i + 1]) : ptx::pack(score[2 * i], score[2 * i + 1], typename C::T());
  }

  // An A operand that products read no more takes the next. ptxas must not see a copy: it would give both the same registers, and end
  // the products that read them before.
  __device__ __forceinline__ void copy(const uint32_t (&from)[C::kRows / 16][4], uint32_t (&to)[C::kRows / 16][4]) const {
    const uint32_t zero = static_cast<uint32_t>(p.tiles) >> 31;
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) to[i / 4][i % 4] = from[i / 4][i % 4] ^ zero;
  }

  // Where this lane stores rows of 128 bytes, 16 rows x 16 columns from `to` on, where the swizzle has the first; others are an exclusive
  // or away.
  static __device__ __forceinline__ uint32_t lane_place(uint32_t to, int lane) {
    return to + (lane & 15) * 128 + (lane / 16 ^ (lane & 7)) * 16;
  }
  __device__ __forceinline__ uint32_t score_place(int first_key) const {
    return lane_place(base + C::kScoreAt + (first_key + warp * 16) * 128, lane);
  }

  // dS of this warp's 16 keys to a buffer, as the warpgroup of dQ reads it. place: see above.
  __device__ __forceinline__ void store_scores(const uint32_t (&operand)[C::kRows / 16][4], uint32_t place,
                                               const Ring<C::kScores>& slot) const {
    if (!C::kWide) ptx::wait(barriers.score_empty(slot.stage), slot.parity ^ 1);
    const uint32_t to = place + slot.stage * C::kScoreBytes;
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) ptx::store_matrices((to ^ i % 4 * 32) + (i / 4) * C::kKeyPanel, operand[i]);
    ptx::fence_async_proxy();
    __syncwarp();
    release(barriers.score_full(slot.stage));
  }

  // 16 keys x kDim of a gradient into shared memory at `to` ([panel][key][128 bytes]), ready for store_boxes(). zero: computed anew each
  // time, so that no place is held in a register meanwhile.
  template <int kCount>
  __device__ __forceinline__ void stage(const float (&sum)[kCount], float factor, uint32_t to, int zero) const {
    using T = typename C::T;
    to = lane_place(to, lane | zero);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {  // 16 keys x 16 columns
      const float* x = sum + j * 8;
      store_block<T>((to ^ j % 4 * 32) + (j / 4) * C::kKeyPanel, x, factor, factor);
    }
  }

  // What stage() left at `from`, `panel_bytes` from one panel to the next, to the keys from `first` of the tile on: a group of this
  // lane's stores.
  __device__ __forceinline__ void store_boxes(const CUtensorMap* map, uint32_t from, uint32_t panel_bytes, BackwardSlot tile,
                                              int first) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
      const int row = static_cast<int>(sequence.z + place.x) + first, wrap = p.cu_seqlens_q != nullptr ? kWrap : 0;
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel)
        ptx::store_box(map, from + panel * panel_bytes,
                       {64 * panel, row, static_cast<int>(place.y), static_cast<int>(sequence.w), wrap});
      ptx::commit_stores();
    }
  }
};

}  // namespace flash::sm90
