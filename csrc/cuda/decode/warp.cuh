// decode/warp.cuh: what one warp computes: scores, online softmax and output of all query lanes over its own chunks of keys.
// Scores are transposed: keys are the 16 lines of the tensor core products, query lanes their 8 columns, so that 8 lanes cost no
// more than they use. A thread holds columns 8 n + 2 (lane % 4) + {0, 1}.
#pragma once
#include "cuda/common/score.cuh"
#include "cuda/decode/ring.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "problem/softmax.h"

namespace flash::decode {

// The maximum follows the scores only when one exceeds it by more than this (log2 units): P stays below 2^8.
inline constexpr float kSlack = 8.f;

template <class T, int kVariant>
struct Warp {
  using Chunks = Ring<kVariant>;
  static constexpr Tile kTile = kTiles[kVariant];
  static constexpr int kN = kTile.lanes / 8, kM = kTile.keys / 16, kD = kTile.bucket / 16;

  uint32_t query[kN][kD][2];
  float out[kN][kD][4];
  float max[kN][2], sum[kN][2];  // log2 units; the sum of this thread's keys
  int row[kN][2];                // query row of a column
  float slope[kN][2];            // of ALiBi, in log2 units

  __device__ __forceinline__ Warp(const Arguments& a, const Segment& s) {
    const int lane = threadIdx.x & 31;
    const T* base = static_cast<const T*>(a.query) + s.batch * a.query_strides.batch + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int column = n * 8 + (lane >> 2);  // of B fragments
      const int index = s.first_lane + column, query_row = a.by_group.quotient(index);
      const int head = s.kv_head * a.group + index - query_row * a.group;
      const T* from = base + query_row * a.query_strides.row + head * a.query_strides.head;
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int offset = d * 16 + half * 8;
          const bool in = column < s.lanes && offset < a.head_dim;
          query[n][d][half] = in ? __ldg(reinterpret_cast<const uint32_t*>(from + offset)) : 0;
        }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int mine = s.first_lane + min(n * 8 + (lane & 3) * 2 + e, s.lanes - 1);
        row[n][e] = a.by_group.quotient(mine);
        if (a.alibi_slopes != nullptr)
          slope[n][e] = __ldg(a.alibi_slopes + s.batch * a.alibi_batch + s.kv_head * a.group + mine - row[n][e] * a.group) *
                        common::kLog2e;
        max[n][e] = -INFINITY;
        sum[n][e] = 0;
      }
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][d][e] = 0;
    }
  }

  // Asks for the rows of query while the length is being read.
  static __device__ __forceinline__ void prefetch_query(const Arguments& a) {
    constexpr int kLines = kTile.bucket / 64;  // of a row
    const int line = threadIdx.x % kLines, plane = a.first_plane + blockIdx.y;
    const int tile = a.row_tiles == 1 ? 0 : plane % a.row_tiles, kv_head = a.row_tiles == 1 ? plane : plane / a.row_tiles;
    const int lane = threadIdx.x / kLines, index = tile * kTile.lanes + lane, row = a.by_group.quotient(index);
    if (lane >= kTile.lanes || row >= a.rows || line * 64 >= a.head_dim) return;
    const Strides& by = a.query_strides;
    ptx::prefetch_l1(static_cast<const T*>(a.query) + (a.first_batch + blockIdx.z) * by.batch + row * by.row +
                     (kv_head * a.group + index - row * a.group) * by.head + line * 64);
  }

  // A chunk that has arrived in `stage`; its first key is number `first`. Calls keys_done() when K is not read any more.
  template <class KeysDone>
  __device__ __forceinline__ void step(const Arguments& a, const Segment& s, uint32_t stage, int first,
                                       const KeysDone& keys_done) {
    float score[kM][kN][4];
    multiply_keys(stage, score);
    keys_done();
    scale(a, s, first, score);
    if (first < s.safe_begin || first + kTile.keys > s.safe_end) hide(a, s, first, score);
    fold(score);
    multiply_values(stage + Chunks::kHalf, score);
  }

  // Sums and states of this warp, for the others to read: [lanes][bucket + 4] and [lanes].
  __device__ __forceinline__ void store(float* sums, float2* states) const {
    const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[n][e];
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(kWarp, total, step);
        const int column = n * 8 + (lane & 3) * 2 + e;
        // NaN scores alone leave no maximum: without one the part would count as empty.
        if (g == 0) states[column] = make_float2(isnan(total) ? 0.f : max[n][e], total);
        float* to = sums + column * (kTile.bucket + 4) + g;
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          to[d * 16] = out[n][d][e];
          to[d * 16 + 8] = out[n][d][e + 2];
        }
      }
  }

 private:
  static __device__ __forceinline__ uint32_t columns(uint32_t address, int d) {  // 16 d columns further
    return (address ^ (32 * (d & 3))) + (d >> 2) * Chunks::kPanel;
  }

  __device__ __forceinline__ void multiply_keys(uint32_t stage, float (&score)[kM][kN][4]) const {
    const int lane = threadIdx.x & 31;
    const uint32_t from = stage + ((lane & 7) + ((lane >> 3) & 1) * 8) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float part[2][kN][4] = {};  // two chains of dependent products
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        uint32_t k[4];
        ptx::load_matrices(k, columns(from, d) + m * 2048);
#pragma unroll
        for (int n = 0; n < kN; ++n) ptx::mma(part[d & 1][n], k, query[n][d][0], query[n][d][1], T{});
      }
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[m][n][e] = part[0][n][e] + part[1][n][e];
    }
  }

  static __device__ __forceinline__ int key_of(int first, int m, int e) {
    return first + m * 16 + ((threadIdx.x & 31) >> 2) + (e >> 1) * 8;
  }

  // Products become scores in log2 units. Every branch is uniform over the launch.
  __device__ __forceinline__ void scale(const Arguments& a, const Segment& s, int first, float (&score)[kM][kN][4]) const {
    const auto each = [&](auto change) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) change(score[m][n][e], m, n, e);
    };
    if (a.capped) each([&](float& x, int, int, int) { x = common::tanh_of<T>(x * a.cap_scale); });
    each([&](float& x, int, int, int) { x *= a.scale_log2; });
    if (a.alibi_slopes != nullptr)
      each([&](float& x, int m, int n, int e) {
        const int distance = row[n][e & 1] + s.diagonal - key_of(first, m, e);
        x -= slope[n][e & 1] * static_cast<float>(abs(distance));
      });
  }

  __device__ __forceinline__ void hide(const Arguments& a, const Segment& s, int first, float (&score)[kM][kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int from = s.first_key(row[n][e & 1], a.left), to = s.last_key(row[n][e & 1], a.right);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const int key = key_of(first, m, e);
          if (key < from || key >= to) score[m][n][e] = -INFINITY;
        }
      }
  }

  // Scores become probabilities under the maximum.
  __device__ __forceinline__ void fold(float (&score)[kM][kN][4]) {
    float top[kN][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[n][e] = fmaxf(score[0][n][e], score[0][n][e + 2]);
#pragma unroll
        for (int m = 1; m < kM; ++m) top[n][e] = fmaxf(top[n][e], fmaxf(score[m][n][e], score[m][n][e + 2]));
        grows |= top[n][e] > max[n][e] + kSlack;
      }
    if (__any_sync(kWarp, grows)) raise(top);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float reference = problem::Softmax<float>::reference(max[n][e & 1]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          score[m][n][e] = ptx::exp2(score[m][n][e] - reference);
          sum[n][e & 1] += score[m][n][e];
        }
      }
  }

  // The maximum becomes that of all keys of a column so far.
  __device__ __forceinline__ void raise(const float (&top)[kN][2]) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float after = top[n][e];
        for (int step = 4; step < 32; step *= 2) after = fmaxf(after, __shfl_xor_sync(kWarp, after, step));
        after = fmaxf(after, max[n][e]);
        const float factor = after == -INFINITY ? 1.f : ptx::exp2(max[n][e] - after);
        max[n][e] = after;
        sum[n][e] *= factor;
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          out[n][d][e] *= factor;
          out[n][d][e + 2] *= factor;
        }
      }
  }

  __device__ __forceinline__ void multiply_values(uint32_t stage, const float (&weight)[kM][kN][4]) {
    const int lane = threadIdx.x & 31;
    const uint32_t from = stage + ((lane & 7) + (lane >> 4) * 8) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t b[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          b[n][half] = ptx::transpose_matrix(ptx::pack(weight[m][n][2 * half], weight[m][n][2 * half + 1], T{}));
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        uint32_t v[4];
        ptx::load_matrices_transposed(v, columns(from, d) + m * 2048);
#pragma unroll
        for (int n = 0; n < kN; ++n) ptx::mma(out[n][d], v, b[n][0], b[n][1], T{});
      }
    }
  }
};

}  // namespace flash::decode
