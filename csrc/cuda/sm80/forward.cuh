// sm80/forward.cuh: forward attention on mma.sync and cp.async, head dims up to 128. A warp owns 32 query rows: their scores,
// softmax state and output stay in its registers; tiles of K and V pass through shared memory, one barrier per tile.
//
// Two bodies. exact(): running maximum, masks, score modifiers. woven() and quick(), plain instances only: the reference that
// exact() found in the first FULL tile is kept and no maximum is taken ("optimistic"); if any row's sum leaves [0, limit) or is NaN
// at the end, the block computes its rows again with exact() alone.
// Online softmax: Dao et al. 2022, algorithm 1; row blocks outside, key blocks inside: Dao 2023.
#pragma once
#include "cuda/common/epilogue.cuh"
#include "cuda/common/row_state.cuh"
#include "cuda/sm80/forward_block.cuh"
#include "cuda/sm80/forward_score.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/store.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T, cuda::ForwardTile kTile>
struct Forward {
  static constexpr int kDim = kTile.bucket, kRows = kTile.rows, kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kBlocks = kRows / kTile.warps / 16;  // blocks of 16 rows per warp
  static constexpr int kSteps = kDim / 16;                  // k16 steps of Q K^T, column blocks of P V
  static constexpr int kChunk = 32;                         // keys of one chunk of woven()
  static constexpr bool kPlain = kTile.plain;
  static constexpr int kExact = kPlain ? 64 : 32;  // keys of one pass of exact(); modifiers need registers too
  static constexpr bool kQueryInRegisters = kTile.body == cuda::Body::kWoven && kDim <= 64;
  using Layout = tile::Swizzled<kDim>;
  using QueryLoader = tile::Loader<Layout, kRows, kThreads>;
  using KeyLoader = tile::Loader<Layout, kKeys, kThreads>;
  using KeyStream = Stream<KeyLoader, Layout, kKeys, kPlain>;
  using Rows = Block<kRows, kKeys>;
  static constexpr int kTileBytes = Layout::bytes(kKeys);
  static_assert(kStages == 2, "exact() may take a tile in several passes: K and V must be there together");

  const ForwardCall& call;
  const Rows& block;
  const int lane, first_row;         // of this warp in the block
  const uint32_t query, key, value;  // lane addresses in Q, in the first stage of K and of V
  float rOut[kBlocks][kDim / 8][4];  // [rows, value_dim], not normalised
  common::RowState<kBlocks> rows;
  common::MaskAhead<T, kBlocks, kExact / 8> mask;

  __device__ __forceinline__ Forward(const ForwardCall& call, const Rows& block, uint32_t sQuery, uint32_t sKey,
                                     uint32_t sValue)
      : call(call),
        block(block),
        lane(threadIdx.x % 32),
        first_row(threadIdx.x / 32 * kBlocks * 16),
        query(Layout::address(sQuery, first_row + tile::row_block_row(lane), tile::row_block_chunk(lane))),
        key(Layout::address(sKey, tile::column_block_row(lane), tile::column_block_chunk(lane))),
        value(Layout::address(sValue, tile::row_block_row(lane), tile::row_block_chunk(lane))) {}

  // rScore [rows, 8 kJ] = Q K^T for the keys from `first` of the tile at `key_tile`.
  template <int kJ>
  __device__ __forceinline__ void scores(float (&rScore)[kBlocks][kJ][4], uint32_t key_tile, int first) {
    tile::clear(rScore);
    tile::multiply_lines<T, Layout, kSteps>(rScore, query, key_tile, first);
  }

  // rOut += P V.
  template <int kJ>
  __device__ __forceinline__ void accumulate(const float (&rProbability)[kBlocks][kJ][4], uint32_t value_tile, int first) {
    uint32_t rP[kBlocks][kJ / 2][4];
    tile::pack<T>(rP, rProbability);
    accumulate(rP, value_tile, first);
  }

  template <int kK>
  __device__ __forceinline__ void accumulate(const uint32_t (&rP)[kBlocks][kK][4], uint32_t value_tile, int first) {
#pragma unroll
    for (int k = 0; k < kK; ++k)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t rValue[4];
        ptx::load_matrices_transposed(rValue, Layout::columns(value_tile, step) + (first + k * 16) * Layout::kRowBytes);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          ptx::mma(rOut[i][2 * step], rP[i][k], rValue[0], rValue[1], T());
          ptx::mma(rOut[i][2 * step + 1], rP[i][k], rValue[2], rValue[3], T());
        }
      }
  }

  // Of the pass of exact() that starts at `key`.
  __device__ __forceinline__ void read_mask(int64_t key) {
    mask.read(call.problem, call.modifiers, block.sequence.batch, block.head, block.sequence.rows, block.interval.keys,
              common::Place(block.row, key, first_row, 0, lane));
  }

  // One tile with every feature. more: another one follows.
  __device__ __forceinline__ void exact(uint32_t key_tile, uint32_t value_tile, int64_t first_key, bool partial, bool more,
                                        const problem::Dropout& dropout) {
#pragma unroll 1
    for (int first = 0; first < kKeys; first += kExact) {
      float rScore[kBlocks][kExact / 8][4];  // [rows, keys]
      const common::Place at(block.row, first_key + first, first_row, 0, lane);
      scores(rScore, key_tile, first);
      const float log2_scale = modify<kPlain>(rScore, call, block, at, mask);
      if constexpr (!kPlain) {  // of the next pass: travels under the rest of this one
        const bool inside = first + kExact < kKeys;
        if (inside || more) read_mask(inside ? first_key + first + kExact : first_key - kKeys);
      }
      if (partial) common::hide<false>(rScore, block.interval, block.sequence.rows, at);
      rows.fold_max(rScore, log2_scale, rOut);
      rows.exponentiate(rScore, log2_scale);
      drop<kPlain>(rScore, call, block, dropout, at, lane);
      accumulate(rScore, value_tile, first);
    }
  }

  // A FULL tile under the kept reference.
  __device__ __forceinline__ void quick(uint32_t key_tile, uint32_t value_tile, float log2_scale) {
    float rScore[kBlocks][kKeys / 8][4];
    scores(rScore, key_tile, 0);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows.exponentiate(rScore[i][j][e], i, e / 2, log2_scale);
    accumulate(rScore, value_tile, 0);
  }

  // One k16 step of the scores of one chunk of keys.
  __device__ __forceinline__ void chunk_step(float (&rScore)[kBlocks][kChunk / 8][4], const uint32_t (&rQuery)[kBlocks][4],
                                             uint32_t key_tile, int first, int step) {
    uint32_t rKey[kChunk / 16][4];
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j)
      ptx::load_matrices(rKey[j], Layout::columns(key_tile, step) + (first + j * 16) * Layout::kRowBytes);
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) tile::multiply<T>(rScore, j, rQuery, rKey[j]);
  }

  // The same as quick() in chunks of keys: the products of chunk n + 1 and the exponentials of chunk n alternate in the
  // instruction stream, so the tensor cores and the exponential unit work at once.
  __device__ __forceinline__ void woven(uint32_t key_tile, uint32_t value_tile, float log2_scale) {
    constexpr int kChunks = kKeys / kChunk, kElements = kBlocks * kChunk / 2;
    constexpr int kPerStep = tile::ceil_div(kElements, kSteps);  // elements of a lane exponentiated per k16 step
    uint32_t rQuery[kQueryInRegisters ? kSteps : 1][kBlocks][4];
    float rScore[2][kBlocks][kChunk / 8][4];
    tile::clear(rScore[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      auto& rQ = rQuery[kQueryInRegisters ? step : 0];
      tile::load_rows<Layout>(rQ, Layout::columns(query, step));
      chunk_step(rScore[0], rQ, key_tile, 0, step);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      auto& rNow = rScore[chunk % 2];
      auto& rNext = rScore[(chunk + 1) % 2];
      const bool more = chunk + 1 < kChunks;
      if (more) tile::clear(rNext);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (more) {
          auto& rQ = rQuery[kQueryInRegisters ? step : 0];
          if constexpr (!kQueryInRegisters) tile::load_rows<Layout>(rQ, Layout::columns(query, step));
          chunk_step(rNext, rQ, key_tile, (chunk + 1) * kChunk, step);
        }
#pragma unroll
        for (int n = step * kPerStep; n < (step + 1) * kPerStep; ++n)
          if (n < kElements) {
            const int i = n / (kChunk / 2), j = n / 4 % (kChunk / 8), e = n % 4;
            rows.exponentiate(rNow[i][j][e], i, e / 2, log2_scale);
          }
      }
      accumulate(rNow, value_tile, chunk * kChunk);
    }
  }

  // Normalised rows to global memory: through this warp's own rows of Q's buffer, or as fp32 partial results.
  __device__ __forceinline__ void store(uint32_t sQuery) {
    const common::RowsOut<float> out = common::rows_out<float>(call, block);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + half * 8 + tile::lane_line(lane);
        tile::scale_line(rOut, i, half, common::finish_row(out, row, rows.max[i][half], rows.sum[i][half], lane % 4 == 0));
      }
    if (out.part != nullptr) {
      store_part(out);
      return;
    }
    __syncwarp();  // the whole warp has read its rows of Q
    tile::store_accumulator<T, Layout>(Layout::address(sQuery, first_row + tile::lane_line(lane), 0), rOut, lane,
                                       [](int j) { return j; });
    __syncwarp();
    const problem::Array& array = call.problem.out;
    T* to = static_cast<T*>(array.data) +
            problem::offset(array, block.sequence.batch, block.head, block.sequence.row + block.row + first_row);
    tile::store_rows<Layout, kBlocks * 16, 32>(reinterpret_cast<char*>(to), array.row * 2, sQuery, first_row,
                                               block.rows - first_row, out.value_dim * 2, kPlain ? 16 : call.store_bytes, lane);
  }

  // By itself, so that its tests do not stand between the stores of the common case.
  __device__ __forceinline__ void store_part(const common::RowsOut<float>& out) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
          common::store_part(out, first_row + i * 16 + half * 8 + tile::lane_line(lane), j * 8 + tile::lane_column(lane),
                             rOut[i][j][2 * half], rOut[i][j][2 * half + 1]);
  }

  static __device__ __forceinline__ void run(const ForwardCall& call) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t sQuery = ptx::shared_address(shared);  // [kRows, kDim]
    const uint32_t sKey = sQuery + Layout::bytes(kRows);  // [kStages, kKeys, kDim]
    const uint32_t sValue = sKey + kStages * kTileBytes;  // [kStages, kKeys, kDim]
    const problem::Problem& p = call.problem;
    const Rows block(call);
    if (block.rows <= 0) return;
    const Rows& kept = block.shared_at(shared + Layout::bytes(kRows) + 2 * kStages * kTileBytes);
    const problem::Dropout dropout =
        !kPlain && call.modifiers.flags & common::kDropout ? problem::dropout(p.seed, p.dropout_p) : problem::Dropout{};
    load_query<QueryLoader, Layout>(call, block, sQuery, kPlain || call.load_bytes == 16);
    KeyStream keys(p.key, p.head_dim, call.load_bytes), values(p.value, p.value_dim, call.load_bytes);
    keys.clear(sKey, kStages);
    values.clear(sValue, kStages);
    const uint32_t key_lane = Layout::address(sKey, KeyLoader::row(), KeyLoader::chunk());
    const uint32_t value_lane = key_lane + kStages * kTileBytes;

    Forward state(call, kept, sQuery, sKey, sValue);
    const float log2_scale = call.modifiers.scale * common::kLog2e;
    const auto start = [&](const Rows& from) {
      if (from.first <= from.last) {
        keys.fetch_last(call, p.key, from, sKey);
        values.fetch_last(call, p.value, from, sValue);
      }
      ptx::commit_copies();
    };
    start(block);
    bool exact_only = !kPlain;
    for (;;) {
      tile::clear(state.rOut);
      state.rows.reset();
      if constexpr (!kPlain)
        if (block.first <= block.last) {
          __syncthreads();  // `kept` is complete
          state.read_mask(int64_t{block.last} * kKeys);
        }
      int stage = 0;
#pragma unroll 1
      for (int tile = block.last; tile >= block.first; --tile) {
        ptx::wait_copies<0>();
        __syncthreads();
        if (tile > block.first) {
          const int other = (stage ^ 1) * kTileBytes;
          keys.fetch(tile - 1, sKey + other, key_lane + other);
          values.fetch(tile - 1, sValue + other, value_lane + other);
        }
        ptx::commit_copies();
        const uint32_t key_tile = state.key + stage * kTileBytes, value_tile = state.value + stage * kTileBytes;
        const bool full = block.full(tile);
        if (exact_only || !full || tile == block.first_full()) {
          state.exact(key_tile, value_tile, int64_t{tile} * kKeys, !full, tile > block.first, dropout);
        } else if constexpr (kPlain && kTile.body == cuda::Body::kWoven) {
          state.woven(key_tile, value_tile, log2_scale);
        } else if constexpr (kPlain) {
          state.quick(key_tile, value_tile, log2_scale);
        }
        stage ^= 1;
      }
      const bool bad = state.rows.close(common::kSumLimit<T>);
      ptx::wait_copies<0>();
      if (exact_only) {
        // Where no key was seen no barrier has passed: Q must have arrived everywhere before results go over it.
        if (block.last < block.first) __syncthreads();
        break;
      }
      if (!__syncthreads_or(bad)) break;
      exact_only = true;
      start(kept);
    }
    state.store(sQuery);
  }
};

}  // namespace flash::sm80
