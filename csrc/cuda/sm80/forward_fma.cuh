// sm80/forward_fma.cuh: forward attention by plain arithmetic: fp64, and fp32 where no TF32 tile fits. Right, not fast.
// A warp owns one query row. Its lanes are the 32 keys of a tile in Q K^T, and columns lane, lane + 32, ... in P V.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/single_score.cuh"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T, cuda::ForwardTile kTile>
struct ForwardFma {
  using Real = common::Sum<T>;
  using Softmax = problem::Softmax<Real>;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kColumns = kTile.bucket / 32;
  static_assert(kTile.rows == kTile.warps && kKeys == 32);

  static __device__ __forceinline__ Real read_mask(const problem::Mask& mask, int64_t at) {
    if (mask.dtype == problem::DType::kBool) return static_cast<const uint8_t*>(mask.data)[at] ? Real(0) : -Real(INFINITY);
    if (mask.dtype == problem::DType::kFloat32) return static_cast<const float*>(mask.data)[at];
    return static_cast<const T*>(mask.data)[at];
  }

  // The score of (row, key) in log2 units, given q . k.
  static __device__ __forceinline__ Real modify(const ForwardCall& call, const Block<kRows, kKeys>& block, int64_t row,
                                                int64_t key, Real dot) {
    const problem::Problem& p = call.problem;
    const int64_t batch = block.sequence.batch;
    Real score = common::single_score(p, batch, block.head, row + block.interval.diagonal, key, dot).score;
    if (p.mask.data != nullptr) {
      const int64_t at = batch * p.mask.batch + block.head * p.mask.head + row * p.mask.row + key * p.mask.key;
      score = common::masked_score(score, read_mask(p.mask, at), Real(1));
    }
    return score * Softmax::kLog2e;
  }

  static __device__ __forceinline__ void run(const ForwardCall& call) {
    __shared__ T sQuery[kRows][kTile.bucket];
    const problem::Problem& p = call.problem;
    const Block<kRows, kKeys> block(call);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= block.rows) return;
    const problem::Sequence& sequence = block.sequence;
    const int64_t row = block.row + warp, kv_head = call.by_group.divide(block.head);
    const T* query =
        static_cast<const T*>(p.query.data) + problem::offset(p.query, sequence.batch, block.head, sequence.row + row);
    for (int d = lane; d < p.head_dim; d += 32) sQuery[warp][d] = query[d];
    __syncwarp();
    const problem::Dropout dropout = p.dropout_p > 0 ? problem::dropout(p.seed, p.dropout_p) : problem::Dropout{};

    Softmax state;
    Real rOut[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) rOut[c] = 0;
    for (int tile = block.last; tile >= block.first; --tile) {
      const int64_t first_key = int64_t{tile} * kKeys, key = first_key + lane;
      Real score = -INFINITY;
      if (block.interval.sees(row, key)) {
        const T* k = static_cast<const T*>(p.key.data) + problem::offset(p.key, sequence.batch, kv_head, sequence.key + key);
        Real dot = 0;
        for (int d = 0; d < p.head_dim; ++d) dot += sQuery[warp][d] * k[d];
        score = modify(call, block, row, key, dot);
      }
      Real largest = score;
      for (int n = 16; n > 0; n /= 2) {
        const Real other = __shfl_xor_sync(tile::kWarp, largest, n);
        largest = other > largest ? other : largest;
      }
      const Real factor = state.fold_max(largest);
      Real probability = Softmax::exp2(score - Softmax::reference(state.max)), sum = probability;
      for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(tile::kWarp, sum, n);
      state.sum += sum;
      if (p.dropout_p > 0 && !dropout.keeps(block.batch * p.heads + block.head, row, key)) probability = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) rOut[c] *= factor;
      for (int n = 0; n < kKeys; ++n) {
        const Real weight = __shfl_sync(tile::kWarp, probability, n);
        if (weight == Real(0)) continue;  // also all keys past the end
        const T* v = static_cast<const T*>(p.value.data) +
                     problem::offset(p.value, sequence.batch, kv_head, sequence.key + first_key + n);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (c * 32 + lane < p.value_dim) rOut[c] += weight * v[c * 32 + lane];
      }
    }

    const common::RowsOut<Real> out = common::rows_out<Real>(call, block);
    const Real factor = common::finish_row(out, warp, state.max, state.sum, lane == 0);
    T* to = static_cast<T*>(p.out.data) + problem::offset(p.out, sequence.batch, block.head, sequence.row + row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      if (column >= p.value_dim) continue;
      if (out.part != nullptr) {
        out.part[warp * p.value_dim + column] = static_cast<float>(rOut[c] * factor);
      } else {
        to[column] = rOut[c] * factor;
      }
    }
  }
};

}  // namespace flash::sm80
