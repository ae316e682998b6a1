// sm90/forward_config.cuh: the shape of one instance, its shared memory and its barriers.
#pragma once
#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tiles.h"

namespace flash::sm90 {

template <class T_, int kVariant, bool kCapped_>
struct ForwardConfig {
  using T = T_;
  static constexpr ForwardTile kTile = kForwardTiles[kVariant];
  static constexpr bool kCapped = kCapped_;  // softcap: an instance of its own, so that the others carry no branch
  static constexpr int kDim = kTile.bucket, kPanels = kDim / 64;
  static constexpr int kGroups = kTile.warpgroups;  // consumer warpgroups, 64 rows each
  static constexpr int kRows = 64 * kGroups, kKeys = kTile.keys;
  static constexpr int kStages = kTile.stages;    // of K and of V
  static constexpr int kQueries = kTile.queries;  // buffers of Q
  static constexpr int kParts = query_parts(kTile);
  static constexpr int kOutputs = kTile.outputs;  // staging panels of O per warp
  static constexpr bool kTurns = kTile.turns;     // ping-pong: warpgroups take turns at issuing products
  static constexpr bool kHalves = kTile.halves;   // half of the exponentials before P V of the block before is waited for
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kProducerRegisters = kTile.producer_registers, kConsumerRegisters = kTile.consumer_registers;
  static constexpr bool kStream = kTile.stream;  // each warpgroup has tiles of its own
  static constexpr bool kEarly = kQueries > 1;   // Q of the next tile is loaded while this one's is in use

  // Blocks of which one warpgroup may see nothing while another does. Those at the end of a tile and at the start of the next are
  // passed over while a V is still in use: more stages than that, or the producer waits for it for ever.
  static constexpr int kUnseen = (64 * (kGroups - 1) + kKeys - 1) / kKeys;
  static_assert(2 * kUnseen <= kStages);

  // Shared memory, bytes. Panels of 64 columns: [panel][row][128 bytes], 128-byte swizzle.
  static constexpr uint32_t kQueryBytes = kRows * kDim * 2, kKeyBytes = kKeys * kDim * 2;
  static constexpr uint32_t kPartBytes = kQueryBytes / kParts, kQueryPanel = kRows / kParts * 128, kKeyPanel = kKeys * 128,
                            kOutputPanel = 16 * 128;
  static constexpr uint32_t kQueryAt = 0;
  static constexpr uint32_t kKeyAt = kQueryAt + kQueries * kQueryBytes;
  static constexpr uint32_t kValueAt = kKeyAt + kStages * kKeyBytes;
  static constexpr uint32_t kOutputAt = kValueAt + kStages * kKeyBytes;
  static constexpr int kSlots = 4;  // of announced tiles: stored, computed, next, and one that is being described
  static constexpr uint32_t kWorkBytes = 80;
  static constexpr uint32_t kWorkAt = kOutputAt + 4 * kGroups * kOutputs * kOutputPanel;
  static constexpr uint32_t kBarriersAt = kWorkAt + kSlots * kWorkBytes;
  static constexpr uint32_t kSharedBytes = kBarriersAt + 8 * (2 * kQueries * kParts + 4 * kStages + 2 * kSlots + 2);

  // Rows of a tile that lie before those of a warpgroup.
  static __device__ __forceinline__ int rows_before(int group) { return 64 * group; }
  // The sums of the tile in a slot overflowed: it has to be done again. By one thread of a warp.
  static __device__ __forceinline__ void note_overflow(uint32_t /*base*/, Slot slot) {
    ptx::store_shared(slot.overflowed(), 1u);
  }
};

// Full: 1 arrival (the producer, the scheduler) and its bytes. Empty: 1 arrival per consumer warp that reads it (of Q: its part); for a
// slot 1 per consumer thread, which racecheck can follow, and the producer's. Drained: 1 per consumer thread.
template <class C>
struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t query_full(int i, int part) const { return base + 8 * (i * C::kParts + part); }
  __device__ __forceinline__ uint32_t query_empty(int i, int part) const { return query_full(C::kQueries + i, part); }
  __device__ __forceinline__ uint32_t key_full(int i) const { return query_full(2 * C::kQueries, i); }
  __device__ __forceinline__ uint32_t key_empty(int i) const { return key_full(C::kStages + i); }
  __device__ __forceinline__ uint32_t value_full(int i) const { return key_full(2 * C::kStages + i); }
  __device__ __forceinline__ uint32_t value_empty(int i) const { return key_full(3 * C::kStages + i); }
  __device__ __forceinline__ uint32_t work_full(int i) const { return key_full(4 * C::kStages + i); }
  __device__ __forceinline__ uint32_t work_empty(int i) const { return work_full(C::kSlots + i); }
  __device__ __forceinline__ uint32_t asked() const { return work_full(2 * C::kSlots); }  // the producer wants a tile
  __device__ __forceinline__ uint32_t drained() const { return work_full(2 * C::kSlots + 1); }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * C::kGroups;
    for (int i = 0; i < C::kQueries * C::kParts; ++i) init_stage(query_full(0, i), 1, query_empty(0, i), kWarps / C::kParts);
    for (int i = 0; i < C::kStages; ++i) {
      init_stage(key_full(i), 1, key_empty(i), kWarps);
      init_stage(value_full(i), 1, value_empty(i), kWarps);
    }
    for (int i = 0; i < C::kSlots; ++i) init_stage(work_full(i), 1, work_empty(i), 32 * kWarps + 1);
    ptx::init_barrier(asked(), 1);
    ptx::init_barrier(drained(), 32 * kWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash::sm90
