// sm80/backward_products.cuh: S^T = K Q^T and dP^T = V dO^T by pairs of warps, for backward.cuh.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/backward_config.cuh"
#include "cuda/tile/multiply.cuh"

namespace flash::sm80 {

template <class Config>
struct ScoreProducts {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using Weights = typename Config::Weights;
  static constexpr int kI = Config::kWarpKeys / 16, kChunk = Config::kChunk, kSteps = Config::kHeadDim / 16;
  static constexpr bool kPaired = Config::kPlain && Config::kSharing == 4;
  static_assert(!kPaired || (kI == 2 && kChunk == 16 && Config::kChunks == 1));
  using Scores = float[kI][kChunk / 8][4];

  // A lane of a warp that owns keys from key_line and the query_warp-th chunk of queries; the block's shared memory.
  struct Place {
    uint32_t shared;
    int key_line, query_warp, lane;
  };

  // Two warps with neighbouring queries share both products: one multiplies S^T, the other dP^T for the queries of both, and each gives the
  // other half of it. That takes two thirds of the reads of shared memory, which bind at these head dims.
  static __device__ __forceinline__ void paired(Scores& rScore, Scores& rGradient, const Place& at, uint32_t sLines,
                                                uint32_t sColumns) {
    const int role = at.query_warp % 2, other = (role == 0 ? kChunk : -kChunk) * Operand::kRowBytes;
    sLines += role * Config::kValueAt;
    sColumns += role * Config::kStages * Config::kRowBytes;
    float rBoth[kI][2 * (kChunk / 8)][4];  // its own queries, then the other one's
    tile::clear(rBoth);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t rLines[kI][4], rColumns[4];
      tile::load_rows<Operand>(rLines, Operand::columns(sLines, k));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ptx::load_matrices(rColumns, Operand::columns(sColumns, k) + j * other);
        tile::multiply<T>(rBoth, j, rLines, rColumns);
      }
    }
    // What crosses lies where its giver's dS^T (i = 0) and P^T (i = 1) of this tile will: line `lane` of its keys, half j of its chunk.
    const auto place = [&](int query_warp, int i, int j) {
      return Weights::address(at.shared + Config::kScoreAt + i * Config::kWeightBytes, at.key_line + at.lane,
                              query_warp * 2 + j);
    };
    const auto wait = [&] {
      ptx::synchronise<64>(1 + at.key_line / Config::kWarpKeys + at.query_warp / 2 * Config::kKeyWarps);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float (&r)[4] = rBoth[i][2 + j];
        ptx::store_shared(place(at.query_warp, i, j),
                          uint4{__float_as_uint(r[0]), __float_as_uint(r[1]), __float_as_uint(r[2]), __float_as_uint(r[3])});
      }
    wait();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 x = ptx::load_shared_16(place(at.query_warp ^ 1, i, j));
        const float theirs[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rScore[i][j][e] = role == 0 ? rBoth[i][j][e] : theirs[e];
          rGradient[i][j][e] = role == 0 ? theirs[e] : rBoth[i][j][e];
        }
      }
    wait();
  }
};

}  // namespace flash::sm80
