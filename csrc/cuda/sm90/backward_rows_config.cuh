// sm90/backward_rows_config.cuh: what a launch of the kernel of dQ by itself is told, the shape of an instance, its shared memory and its
// barriers.
#pragma once
#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tiles.h"

namespace flash::sm90 {

// out is the map of dq; lse is read.
struct RowArguments : ForwardArguments {
  CUtensorMap gradient;  // of the box [rows, 64]
  const float* delta;    // laid out as lse
  float scale;           // of dq
  bool after_keys;       // whether the kernel before is that of dK and dV, which gives nothing that is read here
};

template <class T_, int kVariant>
struct RowConfig {
  using T = T_;
  static constexpr RowGradientTile kTile = kRowGradientTiles[kVariant];
  static constexpr int kDim = kTile.bucket, kPanels = kDim / 64;
  static constexpr int kGroups = kTile.warpgroups, kRows = rows_of(kTile), kKeys = kTile.keys;
  static constexpr int kKeyStages = kTile.stages, kValueStages = kTile.values, kSlots = 2, kThreads = 128 * (kGroups + 1);
  static constexpr int kProducerRegisters = kTile.producer_registers, kConsumerRegisters = kTile.consumer_registers;
  static constexpr uint32_t kRowBytes = kRows * kDim * 2, kRowPanel = kRows * 128;
  static constexpr uint32_t kKeyBytes = kKeys * kDim * 2, kKeyPanel = kKeys * 128;
  static constexpr uint32_t kQueryAt = 0;
  static constexpr uint32_t kGradientAt = kRowBytes;
  static constexpr uint32_t kKeyAt = 2 * kRowBytes;
  static constexpr uint32_t kValueAt = kKeyAt + kKeyStages * kKeyBytes;
  static constexpr uint32_t kWorkBytes = 64;
  static constexpr uint32_t kWorkAt = kValueAt + kValueStages * kKeyBytes;
  static constexpr uint32_t kBarriersAt = kWorkAt + kSlots * kWorkBytes;
  static constexpr uint32_t kSharedBytes = kBarriersAt + 8 * (2 + 2 * (kKeyStages + kValueStages + kSlots));
  static_assert(kSharedBytes <= 232448);
};

// Full: 1 arrival (the producer) and its bytes. Empty: 1 arrival per consumer warp, of tiles per thread (see BackwardBarriers).
template <class C>
struct RowBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t rows_full() const { return base; }
  __device__ __forceinline__ uint32_t rows_empty() const { return base + 8; }
  __device__ __forceinline__ uint32_t key_full(int i) const { return base + 16 + 8 * i; }
  __device__ __forceinline__ uint32_t key_empty(int i) const { return key_full(C::kKeyStages + i); }
  __device__ __forceinline__ uint32_t value_full(int i) const { return key_full(2 * C::kKeyStages + i); }
  __device__ __forceinline__ uint32_t value_empty(int i) const { return value_full(C::kValueStages + i); }
  __device__ __forceinline__ uint32_t work_full(int i) const { return value_full(2 * C::kValueStages + i); }
  __device__ __forceinline__ uint32_t work_empty(int i) const { return work_full(C::kSlots + i); }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * C::kGroups;
    init_stage(rows_full(), 1, rows_empty(), kWarps);
    for (int i = 0; i < C::kKeyStages; ++i) init_stage(key_full(i), 1, key_empty(i), kWarps);
    for (int i = 0; i < C::kValueStages; ++i) init_stage(value_full(i), 1, value_empty(i), kWarps);
    for (int i = 0; i < C::kSlots; ++i) init_stage(work_full(i), 1, work_empty(i), 32 * kWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash::sm90
