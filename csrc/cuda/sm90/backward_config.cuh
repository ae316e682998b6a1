// sm90/backward_config.cuh: the shape of one instance of the Hopper backward, its shared memory and its barriers.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tiles.h"

namespace flash::sm90 {

template <class T_, int kVariant, bool kCapped_>
struct BackwardConfig {
  using T = T_;
  static constexpr BackwardTile kTile = kBackwardTiles[kVariant];
  static constexpr bool kCapped = kCapped_;  // softcap: an instance of its own, so that the others carry no branch
  static constexpr bool kSums = kTile.sums;  // else dS stays in its warpgroup
  static constexpr bool kTurns = kTile.turn > 0;
  static constexpr bool kTells = tells_finished(kTile);
  static constexpr int kDim = kTile.bucket, kPanels = kDim / 64;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys;
  static constexpr bool kWide = kKeys == 64;  // one warpgroup has P and dV, another dS and dK; else each has both for 64 keys
  static constexpr int kQueries = kTile.queries, kGradients = kTile.gradients;  // buffers of Q and its statistics, and of dO
  static constexpr int kKeyStages = kWide ? 1 : 2;                              // of K
  static constexpr int kValueStages = kDim <= 64 ? 2 : 1;                       // of V; there is no room for more
  static constexpr int kScores = kSums ? 2 : kGradients;                        // of dS
  static constexpr bool kRests = !kCapped && std::is_same_v<T, __nv_bfloat16>;  // dS from P as good as in fp32
  // Loops with bounds in uniform registers keep the stages of the rings there too, and with them the descriptors. At dim 128 there are
  // not enough of those registers: vector registers and one REDUX per use are faster.
  static constexpr bool kUniform = kDim != 128;
  static constexpr int kGroups = groups_of(kTile);  // warpgroups beside those of the producer and of dQ
  static constexpr int kThreads = 128 * (1 + kGroups + (kSums ? 1 : 0));
  static constexpr int kProducerRegisters = kSums || kGroups == 3 ? 32 : 40;
  static constexpr int kMainRegisters = kGroups == 3 ? 160 : kSums ? 208 : 232, kQueryRegisters = 64;

  // Shared memory, bytes. Panels of 64 columns: [panel][row][128 bytes], 128-byte swizzle; dS [panel of 64 rows][key][128 bytes].
  static constexpr uint32_t kRowBytes = kRows * kDim * 2, kRowPanel = kRows * 128;
  static constexpr uint32_t kKeyBytes = kKeys * kDim * 2, kKeyPanel = kKeys * 128;
  static constexpr uint32_t kScoreBytes = kSums || kWide ? kRows * kKeys * 2 : 0;
  static constexpr uint32_t kStatisticsBytes = kRows * 32;
  static constexpr uint32_t kKeyAt = 0;
  static constexpr uint32_t kValueAt = kKeyAt + kKeyStages * kKeyBytes;
  static constexpr uint32_t kQueryAt = kValueAt + kValueStages * kKeyBytes;
  static constexpr uint32_t kGradientAt = kQueryAt + kQueries * kRowBytes;
  static constexpr uint32_t kScoreAt = kGradientAt + kGradients * kRowBytes;
  static constexpr uint32_t kWeightAt =
      kScoreAt + (kSums ? kScores * kScoreBytes : 0);  // P between the warpgroups, where kWide
  static constexpr uint32_t kStatisticsAt = kWeightAt + (kWide ? kScoreBytes : 0);
  // One group of 8 rows serves all 64 of an operand (stride 0). compute-sanitizer takes the operand for 2048 bytes from here on.
  static constexpr uint32_t kOnesAt = kStatisticsAt + kQueries * kStatisticsBytes;
  static constexpr uint32_t kZeroAt = kOnesAt + 256;
  static constexpr uint32_t kZeroBytes = 2048;  // what one store clears
  static constexpr int kSlots = 3;              // of announced tiles: finished by some, computed, next
  static constexpr int kTurnStages = 2;         // turns that may have begun and not be noted as added
  static constexpr uint32_t kWorkBytes = 64;
  static constexpr uint32_t kWorkAt = kZeroAt + kZeroBytes;
  static constexpr uint32_t kBarriersAt = kWorkAt + kSlots * kWorkBytes;
  static constexpr int kSumBarriers = kTurns ? 3 * kTurnStages : kTells ? kSlots : 0;  // of threads that follow the sums of dQ
  static constexpr uint32_t kSharedBytes =
      kBarriersAt + 8 * (2 * (kQueries + kGradients + kKeyStages + kValueStages + kScores) + 3 * kSlots + 2 + kSumBarriers);
  static_assert(kSharedBytes <= 232448);
};

// Full: 1 arrival (the producer) and its bytes, or 1 per warp that writes. Empty: 1 arrival per warp that reads.
// Of tiles, and of P between warpgroups: 1 per thread, which is as fast; racecheck does not follow a lane that arrives for its warp.
template <class C>
struct BackwardBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t query_full(int i) const { return base + 8 * i; }
  __device__ __forceinline__ uint32_t query_empty(int i) const { return query_full(C::kQueries + i); }
  __device__ __forceinline__ uint32_t gradient_full(int i) const { return query_full(2 * C::kQueries + i); }
  __device__ __forceinline__ uint32_t gradient_empty(int i) const { return gradient_full(C::kGradients + i); }
  __device__ __forceinline__ uint32_t key_full(int i) const { return gradient_full(2 * C::kGradients + i); }
  __device__ __forceinline__ uint32_t key_empty(int i) const { return key_full(C::kKeyStages + i); }
  __device__ __forceinline__ uint32_t score_full(int i) const { return key_full(2 * C::kKeyStages + i); }
  __device__ __forceinline__ uint32_t score_empty(int i) const { return score_full(C::kScores + i); }
  __device__ __forceinline__ uint32_t work_full(int i) const { return score_full(2 * C::kScores + i); }
  __device__ __forceinline__ uint32_t work_empty(int i) const { return work_full(C::kSlots + i); }
  __device__ __forceinline__ uint32_t cleared(int i) const { return work_full(2 * C::kSlots + i); }
  __device__ __forceinline__ uint32_t value_full(int i) const { return work_full(3 * C::kSlots + i); }
  __device__ __forceinline__ uint32_t value_empty(int i) const { return value_full(C::kValueStages + i); }
  __device__ __forceinline__ uint32_t weight_full() const { return value_full(2 * C::kValueStages); }
  __device__ __forceinline__ uint32_t weight_empty() const { return weight_full() + 8; }
  // Of a turn (backward_order.cuh): dQ may be added; is added; that is known. 1, all threads of dQ, 1 arrival.
  __device__ __forceinline__ uint32_t turn(int i) const { return weight_full() + 16 + 8 * i; }
  __device__ __forceinline__ uint32_t added(int i) const { return turn(C::kTurnStages + i); }
  __device__ __forceinline__ uint32_t noted(int i) const { return turn(2 * C::kTurnStages + i); }
  // Of a tile, where none take turns: its dQ is added.
  __device__ __forceinline__ uint32_t summed(int i) const { return weight_full() + 16 + 8 * i; }

  __device__ __forceinline__ void init(bool cleans, bool counts) const {
    constexpr int kWarps = 4, kMain = 4 * C::kGroups;
    for (int i = 0; i < C::kQueries; ++i) init_stage(query_full(i), 1, query_empty(i), kMain);
    for (int i = 0; i < C::kGradients; ++i) init_stage(gradient_full(i), 1, gradient_empty(i), kMain);
    for (int i = 0; i < C::kKeyStages; ++i)
      init_stage(key_full(i), 1, key_empty(i), (C::kWide ? kWarps : kMain) + (C::kSums ? kWarps : 0));
    for (int i = 0; i < C::kScores; ++i) init_stage(score_full(i), C::kWide ? kWarps : kMain, score_empty(i), kWarps);
    const int alone = (cleans ? 1 : 0) + (C::kTurns ? 2 : C::kTells && counts ? 1 : 0);  // threads beside the producer
    for (int i = 0; i < C::kSlots; ++i) {
      init_stage(work_full(i), 1, work_empty(i), 32 * (kMain + (C::kSums ? kWarps : 0)) + alone);
      ptx::init_barrier(cleared(i), 1);
    }
    for (int i = 0; i < C::kValueStages; ++i) init_stage(value_full(i), 1, value_empty(i), C::kWide ? kWarps : kMain);
    init_stage(weight_full(), 32 * kWarps, weight_empty(), 32 * kWarps);
    if constexpr (C::kTurns) {
      for (int i = 0; i < C::kTurnStages; ++i)
        ptx::init_barrier(turn(i), 1), ptx::init_barrier(added(i), 32 * kWarps), ptx::init_barrier(noted(i), 1);
    } else if constexpr (C::kTells) {
      for (int i = 0; i < C::kSlots; ++i) ptx::init_barrier(summed(i), 32 * kWarps);
    }
    ptx::fence_barrier_init();
  }
};

}  // namespace flash::sm90
