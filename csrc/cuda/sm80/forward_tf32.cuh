// sm80/forward_tf32.cuh: fp32 forward attention on tensor cores. x = high + low, both TF32; a b = high high + high low + low high
// (kTile.terms == 3) has fp32's accuracy, high high alone (terms == 1) TF32's.
// Tensor cores truncate when they add in fp32. So the output of each tile has a fresh accumulator that is added by FADD, and the
// small products of Q K^T have their own accumulator beside the large ones.
// Permutations save all transposes: inside a k8 step of P V, k = t and t + 4 of the A operand are keys 2t and 2t + 1, which the
// accumulators of Q K^T already hold; and column g of n8 tile j of V is 4 g + j, so that one 16-byte read feeds four products.
#pragma once
#include "cuda/common/epilogue.cuh"
#include "cuda/common/row_state.cuh"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/sm80/forward_score.cuh"
#include "cuda/tile/multiply_tf32.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <cuda::ForwardTile kTile>
struct ForwardTf32 {
  static constexpr int kDim = kTile.bucket, kRows = kTile.rows, kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads(), kBlocks = kRows / kTile.warps / 16;
  static constexpr bool kThree = kTile.terms == 3;
  static constexpr bool kBlockInShared = cuda::block_in_shared(kTile);
  using Layout = tile::Padded<kDim>;
  using QueryLoader = tile::Loader<Layout, kRows, kThreads>;
  using KeyLoader = tile::Loader<Layout, kKeys, kThreads>;
  using KeyStream = Stream<KeyLoader, Layout, kKeys, false>;
  using Rows = Block<kRows, kKeys>;
  static constexpr int kTileBytes = Layout::bytes(kKeys);

  const ForwardCall& call;
  const Rows& block;
  const int lane, first_row;
  const uint32_t query, key, value;  // lane addresses in Q, in the first stage of K and of V
  float rOut[kBlocks][kDim / 8][4];  // [rows, value_dim]; [i][4 d + q][2 half + f]: column 32 d + 4 (2 (lane % 4) + f) + q
  common::RowState<kBlocks> rows;

  __device__ __forceinline__ ForwardTf32(const ForwardCall& call, const Rows& block, uint32_t sQuery, uint32_t sKey,
                                         uint32_t sValue)
      : call(call),
        block(block),
        lane(threadIdx.x % 32),
        first_row(threadIdx.x / 32 * kBlocks * 16),
        query(Layout::address(sQuery, first_row + tile::row_block_row(lane), tile::row_block_chunk(lane))),
        key(Layout::address(sKey, tile::column_block_row(lane), tile::column_block_chunk(lane))),
        value(Layout::address(sValue, tile::lane_column(lane), tile::lane_line(lane))) {}

  using Scores = float[kBlocks][kKeys / 8][4];
  // k8 steps in one chain of truncating additions. Each may lose 2^-23 of a sum that is sqrt(kDim) times its scores' size.
  static constexpr int kSteps = kDim / 8, kChain = kDim > 128 ? 8 : kSteps;

  // rScore [rows, keys] = Q K^T.
  __device__ __forceinline__ void scores(Scores& rScore, uint32_t key_tile) {
    Scores rSmall;
    tile::clear(rScore);
    tile::clear(rSmall);
    const auto chain = [&](Scores& rLarge, int first) {
      tile::multiply_lines<Layout, kThree, kChain>(rLarge, rSmall, query, 16 * Layout::kRowBytes, key_tile, first);
    };
    if constexpr (kChain == kSteps) {
      chain(rScore, 0);
    } else {
#pragma unroll 1
      for (int first = 0; first < kSteps; first += kChain) {
        Scores rLarge;
        tile::clear(rLarge);
        chain(rLarge, first);
        tile::add(rScore, rLarge);
      }
    }
    if constexpr (kThree) tile::add(rScore, rSmall);
  }

  // rOut += P V.
  __device__ __forceinline__ void accumulate(const Scores& rProbability, uint32_t value_tile) {
    constexpr int kKeySteps = kKeys / 8;
    tile::accumulate_rows<Layout, kThree, kKeySteps, kKeySteps>(
        rOut, value_tile, [&](int k, int i) { return tile::operand(rProbability[i][k]); });
  }

  // Scores of a tile to probabilities, with every feature.
  __device__ __forceinline__ void exact(float (&rScore)[kBlocks][kKeys / 8][4], int64_t first_key, bool partial,
                                        const problem::Dropout& dropout) {
    const common::Place at(block.row, first_key, first_row, 0, lane);
    const float log2_scale = modify<false>(rScore, call, block, at, common::MaskAhead<float, kBlocks, kKeys / 8>());
    if (partial) common::hide<false>(rScore, block.interval, block.sequence.rows, at);
    rows.fold_max(rScore, log2_scale, rOut);
    rows.exponentiate(rScore, log2_scale);
    drop<false>(rScore, call, block, dropout, at, lane);
  }

  // Normalised rows to global memory, straight from the registers: a lane holds four neighbouring columns.
  __device__ __forceinline__ void store() {
    const common::RowsOut<float> out = common::rows_out<float>(call, block);
    const problem::Array& array = call.problem.out;
    float* first = static_cast<float*>(array.data) +
                   problem::offset(array, block.sequence.batch, block.head, block.sequence.row + block.row);
    const bool wide = out.part == nullptr && call.store_bytes == 16;
    const int64_t stride = out.part != nullptr ? out.value_dim : array.row;
    if (out.part != nullptr) first = out.part;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + half * 8 + tile::lane_line(lane);
        const float factor = common::finish_row(out, row, rows.max[i][half], rows.sum[i][half], lane % 4 == 0);
        if (row >= out.rows) continue;
#pragma unroll
        for (int d = 0; d < kDim / 32; ++d)
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            const int column = d * 32 + 4 * (tile::lane_column(lane) + f);
            float* to = first + row * stride + column;
            float v[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) v[q] = rOut[i][d * 4 + q][2 * half + f] * factor;
            if (wide && column < out.value_dim) {
              *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
              for (int q = 0; q < 4; ++q)
                if (column + q < out.value_dim) to[q] = v[q];
            }
          }
      }
  }

  static __device__ __forceinline__ void run(const ForwardCall& call) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t sQuery = ptx::shared_address(shared);  // [kRows, kDim]
    const uint32_t sKey = sQuery + Layout::bytes(kRows);  // [kStages, kKeys, kDim]
    const uint32_t sValue = sKey + kStages * kTileBytes;  // [kStages, kKeys, kDim]
    const problem::Problem& p = call.problem;
    const Rows block(call);
    if (block.rows <= 0) return;
    constexpr int kBlockAt = Layout::bytes(kRows) + 2 * kStages * kTileBytes;
    static_assert(cuda::forward_shared_bytes(kTile, 4) == kBlockAt + (kBlockInShared ? cuda::kSharedBlockBytes : 0));
    const Rows& kept = kBlockInShared ? block.shared_at(shared + kBlockAt) : block;
    const problem::Dropout dropout =
        call.modifiers.flags & common::kDropout ? problem::dropout(p.seed, p.dropout_p) : problem::Dropout{};
    KeyStream keys(p.key, p.head_dim, call.load_bytes), values(p.value, p.value_dim, call.load_bytes);
    load_query<QueryLoader, Layout>(call, block, sQuery, call.load_bytes == 16);
    keys.clear(sKey, kStages);
    values.clear(sValue, kStages);
    const uint32_t key_lane = Layout::address(sKey, KeyLoader::row(), KeyLoader::chunk());
    const uint32_t value_lane = key_lane + kStages * kTileBytes;

    ForwardTf32 state(call, kept, sQuery, sKey, sValue);
    tile::clear(state.rOut);
    state.rows.reset();
    if (block.first <= block.last) {
      keys.fetch_last(call, p.key, block, sKey);
      values.fetch_last(call, p.value, block, sValue);
    }
    ptx::commit_copies();
    int stage = 0;
#pragma unroll 1
    for (int tile = block.last; tile >= block.first; --tile) {
      const bool more = tile > block.first;
      const int other = (stage ^ 1) * kTileBytes;
      ptx::wait_copies<0>();
      __syncthreads();
      if (kStages == 2 && more) {
        keys.fetch(tile - 1, sKey + other, key_lane + other);
        values.fetch(tile - 1, sValue + other, value_lane + other);
      }
      if (kStages == 1 && tile < block.last) values.fetch(tile, sValue, value_lane);
      ptx::commit_copies();
      float rScore[kBlocks][kKeys / 8][4];
      state.scores(rScore, state.key + stage * kTileBytes);
      state.exact(rScore, int64_t{tile} * kKeys, !block.full(tile), dropout);
      if constexpr (kStages == 1) {
        ptx::wait_copies<0>();
        __syncthreads();
        if (more) keys.fetch(tile - 1, sKey, key_lane);
        ptx::commit_copies();
      }
      state.accumulate(rScore, state.value + stage * kTileBytes);
      if constexpr (kStages == 2) stage ^= 1;
    }
    ptx::wait_copies<0>();
    if (kBlockInShared && block.last < block.first) __syncthreads();  // no tile, no barrier: `kept` is not complete
    state.rows.close(INFINITY);
    state.store();
  }
};

}  // namespace flash::sm80
