// sm80/backward_config.cuh: how a block of backward.cuh divides a tile among its warps, and its shared memory.
#pragma once
#include "cuda/tile/layout.cuh"
#include "cuda/tile/load.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T_, cuda::BackwardTile kTile>
struct KeysConfig {
  using T = T_;
  static constexpr bool kPlain = kTile.plain;
  static constexpr int kResident = kTile.resident;
  static constexpr int kHeadDim = kTile.bucket, kKeys = kTile.keys, kRows = kTile.rows, kStages = kTile.stages;
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kSharing = kTile.sharing, kKeyWarps = kWarps / kSharing;
  static constexpr int kWarpKeys = kKeys / kKeyWarps;  // lines of S^T, dP^T, dK, dV
  static constexpr int kChunk = kTile.chunk;           // queries that a warp multiplies at a time
  static constexpr int kChunks = kRows / (kChunk * kSharing);
  static constexpr int kColumns = kHeadDim / kSharing;  // of dK and dV
  // dQ [kRows, kHeadDim]: 32 rows per warp where the columns divide into blocks of 16 among the warps that are left.
  static constexpr int kDqRows = kHeadDim / 16 % (kWarps / (kRows / 32)) == 0 ? 32 : 16;
  static constexpr int kDqRowWarps = kRows / kDqRows, kDqColumnWarps = kWarps / kDqRowWarps;
  static constexpr int kDqColumns = kHeadDim / kDqColumnWarps;

  using Operand = tile::Swizzled<kHeadDim>;  // K, V [kKeys, kHeadDim]; Q, dO [kRows, kHeadDim]
  using Weights = tile::Swizzled<kRows>;     // P^T, dS^T [kKeys, kRows]
  using KeyLoader = tile::Loader<Operand, kKeys, kThreads>;
  using RowLoader = tile::Loader<Operand, kRows, kThreads>;

  static constexpr int kKeyBytes = Operand::bytes(kKeys), kRowBytes = Operand::bytes(kRows),
                       kWeightBytes = Weights::bytes(kKeys);
  static constexpr int kStatisticsBytes = 2 * kRows * 4;  // lse2, delta
  // Shared memory: K, V, Q[stages], dO[stages], dS^T, P^T if it crosses, statistics[stages], Owner if not plain.
  static constexpr int kValueAt = kKeyBytes, kQueryAt = 2 * kKeyBytes, kGradientAt = kQueryAt + kStages * kRowBytes;
  static constexpr int kScoreAt = kGradientAt + kStages * kRowBytes, kWeightAt = kScoreAt + kWeightBytes;
  static constexpr int kStatisticsAt = kWeightAt + (kSharing > 1 ? kWeightBytes : 0);
  static constexpr int kOwnerAt = kStatisticsAt + kStages * kStatisticsBytes;  // Owner
  static constexpr int kSharedBytes = kOwnerAt + (kPlain ? 0 : cuda::kSharedBlockBytes);
  static_assert(kSharedBytes == cuda::backward_shared_bytes(kTile));
};

}  // namespace flash::sm80
