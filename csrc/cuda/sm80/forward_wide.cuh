// sm80/forward_wide.cuh: forward attention for head dims of 129 and more. kSharing warps own 32 (or 16) query rows together: in
// Q K^T each takes its share of a tile's keys, in P V its share of the columns; P crosses between them through shared memory. That
// halves the reads of K and V per row, which bind here, and lets two blocks fit a multiprocessor. K and V alternate in one stage:
// V of a tile travels under its Q K^T, K of the next under its P V.
// Bodies and redo as in forward.cuh. The maximum of a row crosses between the warps in the exact body only.
#pragma once
#include "cuda/common/epilogue.cuh"
#include "cuda/common/row_state.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/sm80/forward_score.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/store.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T, cuda::ForwardTile kTile>
struct ForwardWide {
  static constexpr int kDim = kTile.bucket, kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kSharing = kTile.sharing, kGroups = kTile.warps / kSharing;
  static constexpr int kBlocks = kRows / kGroups / 16;  // blocks of 16 rows per group
  static constexpr int kOwnKeys = kKeys / kSharing, kOwnDim = kDim / kSharing;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kPanelSteps = 4 / kSharing;  // of the four k16 column steps of 64 columns, those of one warp
  static constexpr bool kPlain = kTile.plain;
  using Layout = tile::Swizzled<kDim>;
  using ScoreLayout = tile::Swizzled<kKeys>;
  using QueryLoader = tile::Loader<Layout, kRows, kThreads>;
  using KeyLoader = tile::Loader<Layout, kKeys, kThreads>;
  using KeyStream = Stream<KeyLoader, Layout, kKeys, kPlain>;
  using Rows = Block<kRows, kKeys>;
  static_assert(Layout::kWide && kTile.stages == 1 && 4 % kSharing == 0 && kOwnKeys % 16 == 0);

  const ForwardCall& call;
  const Rows& block;
  const int lane, group, share, first_row;        // share: which of the group's warps; first_row: of the group in the block
  const uint32_t query, key, value, probability;  // lane addresses in Q, K, V and P
  const uint32_t sProbability;                    // [kRows, kKeys] of T
  float* const sExchange;                         // [kSharing, kRows]
  float rOut[kBlocks][kOwnDim / 8][4];            // [rows, own columns], not normalised
  common::RowState<kBlocks> rows;

  __device__ __forceinline__ ForwardWide(const ForwardCall& call, const Rows& block, uint32_t sQuery, uint32_t sKey,
                                         uint32_t sValue, uint32_t sProbability, float* sExchange)
      : call(call),
        block(block),
        lane(threadIdx.x % 32),
        group(threadIdx.x / 32 / kSharing),
        share(threadIdx.x / 32 % kSharing),
        first_row(group * kBlocks * 16),
        query(Layout::address(sQuery, first_row + tile::row_block_row(lane), tile::row_block_chunk(lane))),
        key(Layout::address(sKey, share * kOwnKeys + tile::column_block_row(lane), tile::column_block_chunk(lane))),
        value(Layout::columns(Layout::address(sValue, tile::row_block_row(lane), tile::row_block_chunk(lane)),
                              share * kPanelSteps)),
        probability(ScoreLayout::address(sProbability, first_row + tile::row_block_row(lane), tile::row_block_chunk(lane))),
        sProbability(sProbability),
        sExchange(sExchange) {}

  // This warp's columns: the n-th block of 16 is step own_step(n), plus share * kPanelSteps, of the row's blocks of 16.
  static __device__ __forceinline__ constexpr int own_step(int n) { return n / kPanelSteps * 4 + n % kPanelSteps; }

  // The chunk of column block j of rOut, from the warp's first.
  static __device__ __forceinline__ constexpr int own_chunk(int j) { return own_step(j / 2) * 2 + j % 2; }

  __device__ __forceinline__ int row_of(int i, int half) const { return first_row + i * 16 + half * 8 + tile::lane_line(lane); }

  // rScore [rows, own keys] = Q K^T.
  __device__ __forceinline__ void scores(float (&rScore)[kBlocks][kOwnKeys / 8][4]) {
    tile::clear(rScore);
    tile::multiply_lines<T, Layout, kSteps>(rScore, query, key);
  }

  // rOut += P V over all keys of the tile, own columns.
  __device__ __forceinline__ void accumulate() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t rP[kBlocks][4], rValue[4];
      tile::load_rows<ScoreLayout>(rP, ScoreLayout::columns(probability, k));
#pragma unroll
      for (int n = 0; n < kOwnDim / 16; ++n) {
        ptx::load_matrices_transposed(rValue, Layout::columns(value, own_step(n)) + k * 16 * Layout::kRowBytes);
        tile::multiply<T>(rOut, n, rP, rValue);
      }
    }
  }

  // Takes in the maxima of the group's scores.
  __device__ __forceinline__ void fold_max(const float (&rScore)[kBlocks][kOwnKeys / 8][4], float log2_scale) {
    float own[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[i][half] = tile::quad_max(tile::line_max(rScore, i, half));
        if (lane % 4 == 0) sExchange[share * kRows + row_of(i, half)] = own[i][half];
      }
    ptx::synchronise<kSharing * 32>(group + 1);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = own[i][half];
#pragma unroll
        for (int n = 0; n < kSharing; ++n) largest = fmaxf(largest, sExchange[n * kRows + row_of(i, half)]);
        rows.raise(i, half, fmaxf(rows.max[i][half], largest * log2_scale), rOut);
      }
  }

  using Mask = common::MaskAhead<T, kBlocks, kOwnKeys / 8>;

  __device__ __forceinline__ common::Place place(int64_t first_key) const {
    return common::Place(block.row, first_key, first_row, share * kOwnKeys, lane);
  }

  // Own scores of a tile to probabilities, with every feature.
  __device__ __forceinline__ void exact(float (&rScore)[kBlocks][kOwnKeys / 8][4], int64_t first_key, bool partial,
                                        const problem::Dropout& dropout, const Mask& mask) {
    const common::Place at = place(first_key);
    const float log2_scale = modify<kPlain>(rScore, call, block, at, mask);
    if (partial) common::hide<false>(rScore, block.interval, block.sequence.rows, at);
    fold_max(rScore, log2_scale);
    rows.exponentiate(rScore, log2_scale);
    drop<kPlain>(rScore, call, block, dropout, at, lane);
  }

  // Own scores of a FULL tile to probabilities under the kept reference.
  __device__ __forceinline__ void quick(float (&rScore)[kBlocks][kOwnKeys / 8][4]) {
    const float log2_scale = call.modifiers.scale * common::kLog2e;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kOwnKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows.exponentiate(rScore[i][j][e], i, e / 2, log2_scale);
  }

  // Own probabilities to where the group's warps read them.
  __device__ __forceinline__ void share_probabilities(const float (&rProbability)[kBlocks][kOwnKeys / 8][4]) {
    tile::store_accumulator<T, ScoreLayout>(ScoreLayout::address(sProbability, row_of(0, 0), share * (kOwnKeys / 8)),
                                            rProbability, lane, [](int j) { return j; });
  }

  // Adds the sums of the group's warps up. Called by the whole block.
  __device__ __forceinline__ bool close() {
    bool bad = rows.close(common::kSumLimit<T>);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0) sExchange[share * kRows + row_of(i, half)] = rows.sum[i][half];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kSharing; ++n) sum += sExchange[n * kRows + row_of(i, half)];
        rows.sum[i][half] = sum;
        bad |= !(sum < common::kSumLimit<T>);
      }
    return bad;
  }

  __device__ __forceinline__ void store(uint32_t sQuery) {
    const common::RowsOut<float> out = common::rows_out<float>(call, block);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        tile::scale_line(rOut, i, half,
                         common::finish_row(out, row, rows.max[i][half], rows.sum[i][half], share == 0 && lane % 4 == 0));
      }
    if (out.part != nullptr) {
      store_part(out);
      return;
    }
    tile::store_accumulator<T, Layout>(Layout::address(sQuery, row_of(0, 0), share * kPanelSteps * 2), rOut, lane, own_chunk);
    __syncthreads();
    const problem::Array& array = call.problem.out;
    T* to =
        static_cast<T*>(array.data) + problem::offset(array, block.sequence.batch, block.head, block.sequence.row + block.row);
    tile::store_rows<Layout, kRows, kThreads>(reinterpret_cast<char*>(to), array.row * 2, sQuery, 0, block.rows,
                                              out.value_dim * 2, kPlain ? 16 : call.store_bytes, threadIdx.x);
  }

  // By itself, so that its tests do not stand between the stores of the common case.
  __device__ __forceinline__ void store_part(const common::RowsOut<float>& out) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kOwnDim / 8; ++j)
          common::store_part(out, row_of(i, half), (share * kPanelSteps * 2 + own_chunk(j)) * 8 + tile::lane_column(lane),
                             rOut[i][j][2 * half], rOut[i][j][2 * half + 1]);
  }

  static __device__ __forceinline__ void run(const ForwardCall& call) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t sQuery = ptx::shared_address(shared);          // [kRows, kDim]
    const uint32_t sKey = sQuery + Layout::bytes(kRows);          // [kKeys, kDim]
    const uint32_t sValue = sKey + Layout::bytes(kKeys);          // [kKeys, kDim]
    const uint32_t sProbability = sValue + Layout::bytes(kKeys);  // [kRows, kKeys]
    float* sExchange = reinterpret_cast<float*>(shared + Layout::bytes(kRows + 2 * kKeys) + ScoreLayout::bytes(kRows));
    const problem::Problem& p = call.problem;
    const Rows block(call);
    if (block.rows <= 0) return;
    const Rows& kept = block.shared_at(reinterpret_cast<uint8_t*>(sExchange + kSharing * kRows));
    const problem::Dropout dropout =
        !kPlain && call.modifiers.flags & common::kDropout ? problem::dropout(p.seed, p.dropout_p) : problem::Dropout{};
    load_query<QueryLoader, Layout>(call, block, sQuery, kPlain || call.load_bytes == 16);
    KeyStream keys(p.key, p.head_dim, call.load_bytes), values(p.value, p.value_dim, call.load_bytes);
    keys.clear(sKey, 1);
    values.clear(sValue, 1);
    const uint32_t key_lane = Layout::address(sKey, KeyLoader::row(), KeyLoader::chunk());
    const uint32_t value_lane = key_lane + Layout::bytes(kKeys);

    ForwardWide state(call, kept, sQuery, sKey, sValue, sProbability, sExchange);
    const auto start = [&](const Rows& from) {
      if (from.first <= from.last) {
        keys.fetch_last(call, p.key, from, sKey);
        ptx::commit_copies();
        values.fetch_last(call, p.value, from, sValue);
      }
      ptx::commit_copies();
    };
    start(block);
    Mask mask;
    const auto read_mask = [&](int tile) {
      mask.read(p, call.modifiers, kept.sequence.batch, kept.head, kept.sequence.rows, kept.interval.keys,
                state.place(int64_t{tile} * kKeys));
    };
    if constexpr (!kPlain) {
      __syncthreads();  // `kept` is complete
      if (block.first <= block.last) read_mask(block.last);
    }
    bool exact_only = !kPlain;
    for (;;) {
      tile::clear(state.rOut);
      state.rows.reset();
#pragma unroll 1
      for (int tile = block.last; tile >= block.first; --tile) {
        if (tile == block.last) {  // its V is under way already
          ptx::wait_copies<1>();
          __syncthreads();
        } else {
          ptx::wait_copies<0>();
          __syncthreads();
          values.fetch(tile, sValue, value_lane);
          ptx::commit_copies();
        }
        float rScore[kBlocks][kOwnKeys / 8][4];
        state.scores(rScore);
        const bool full = block.full(tile);
        if (!kPlain || exact_only || !full || tile == block.first_full()) {
          state.exact(rScore, int64_t{tile} * kKeys, !full, dropout, mask);
          if (!kPlain && tile > block.first) read_mask(tile - 1);  // travels under the rest of this tile
        } else {
          state.quick(rScore);
        }
        state.share_probabilities(rScore);
        ptx::wait_copies<0>();
        __syncthreads();
        if (tile > block.first) keys.fetch(tile - 1, sKey, key_lane);
        ptx::commit_copies();
        state.accumulate();
      }
      ptx::wait_copies<0>();
      __syncthreads();  // Q and the exchange are free, or, where no key was seen, Q has arrived
      const bool bad = state.close();
      if (exact_only || !__syncthreads_or(bad)) break;
      exact_only = true;
      start(kept);
    }
    state.store(sQuery);
  }
};

}  // namespace flash::sm80
