// sm90/backward_producer.cuh: the producer of a block: one thread that fetches tiles and feeds K, V, Q, dO and the statistics by TMA.
// It runs ahead of the others as far as the buffers let it, across tiles.
#pragma once
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/panels.cuh"

namespace flash::sm90 {

template <class C>
struct BackwardProducer {
  const BackwardArguments& p;
  uint32_t base;
  BackwardBarriers<C> barriers;
  Ring<C::kQueries> query;
  Ring<C::kGradients> gradient;
  Ring<C::kKeyStages> key;
  Ring<C::kValueStages> value;
  Ring<C::kSlots> slot;

  __device__ __forceinline__ BackwardSlot slot_at(int stage) const { return {base + C::kWorkAt + C::kWorkBytes * stage}; }

  // Takes a tile from the grid.
  __device__ __forceinline__ int claim() const { return static_cast<int>(atomicAdd(p.counter, 1u)) + p.given; }

  // Tells the others about tile `next`, or the first after it that is not idle; false: that there is none.
  __device__ __forceinline__ bool announce(int next) {
    ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
    const BackwardSlot to = slot_at(slot.stage);
    while (next < p.tiles && !decode<C::kRows, C::kKeys, C::kTurns>(p, next, to)) next = claim();
    ptx::store_shared(to.index(), next);
    ptx::arrive(barriers.work_full(slot.stage));
    slot.next();
    return next < p.tiles;
  }

  template <uint32_t kPanelBytes>
  __device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, uint32_t full, int row, int head, int sequence) {
    const int wrap = p.cu_seqlens_q != nullptr ? kWrap : 0;
    load_panels<C::kPanels>(to, kPanelBytes, map, full, row, head, sequence, wrap);
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap* map, uint32_t to, uint32_t full, BackwardSlot tile) {
    const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
    ptx::arrive_expecting(full, C::kKeyBytes);
    load<C::kKeyPanel>(to, map, full, static_cast<int>(sequence.z + place.x), static_cast<int>(place.y),
                       static_cast<int>(sequence.w));
  }
  // To L2, where there is no buffer yet.
  __device__ __forceinline__ void prefetch_keys(const CUtensorMap* map, BackwardSlot tile) const {
    const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
    const int row = static_cast<int>(sequence.z + place.x), wrap = p.cu_seqlens_q != nullptr ? kWrap : 0;
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      ptx::prefetch_box(map, {64 * panel, row, static_cast<int>(place.y), static_cast<int>(sequence.w), wrap});
  }
  __device__ __forceinline__ void load_key(BackwardSlot tile) {
    ptx::wait(barriers.key_empty(key.stage), key.parity ^ 1);
    load_keys(&p.key, base + C::kKeyAt + key.stage * C::kKeyBytes, barriers.key_full(key.stage), tile);
    key.next();
  }
  __device__ __forceinline__ void load_value(BackwardSlot tile) {
    ptx::wait(barriers.value_empty(value.stage), value.parity ^ 1);
    load_keys(&p.value, base + C::kValueAt + value.stage * C::kKeyBytes, barriers.value_full(value.stage), tile);
    value.next();
  }
  __device__ __forceinline__ void load_query(int row, int head, int sequence, const uint4* statistics) {
    const uint32_t full = barriers.query_full(query.stage);
    ptx::wait(barriers.query_empty(query.stage), query.parity ^ 1);
    ptx::arrive_expecting(full, C::kRowBytes + C::kStatisticsBytes);
    load<C::kRowPanel>(base + C::kQueryAt + query.stage * C::kRowBytes, &p.query, full, row, head, sequence);
    ptx::load_bytes(base + C::kStatisticsAt + query.stage * C::kStatisticsBytes, statistics, C::kStatisticsBytes, full);
    query.next();
  }
  __device__ __forceinline__ void load_gradient(int row, int head, int sequence) {
    const uint32_t full = barriers.gradient_full(gradient.stage);
    ptx::wait(barriers.gradient_empty(gradient.stage), gradient.parity ^ 1);
    ptx::arrive_expecting(full, C::kRowBytes);
    load<C::kRowPanel>(base + C::kGradientAt + gradient.stage * C::kRowBytes, &p.gradient, full, row, head, sequence);
    gradient.next();
  }

  // Loads what a tile needs, then announces the next; returns whether there is one. The others are two or three steps behind: time for
  // the claim, which is made a step before it is needed, and for K. Earlier would be worse: blocks that are nearly done get the next
  // tile, not those that began first.
  __device__ __forceinline__ bool feed(BackwardSlot tile) {
    const uint4 place = ptx::load_shared_16(tile.place()), source = ptx::load_shared_16(tile.source());
    const int first = static_cast<int>(place.z), count = static_cast<int>(place.w) - first + 1;
    const int steps = count * p.group, sequence = static_cast<int>(source.y);
    int head = static_cast<int>(place.y) * p.group, m = 0;
    int row = static_cast<int>(source.x) + first * C::kRows;
    constexpr int kUnit = C::kStatisticsBytes / 16;
    const uint4* statistics =
        p.statistics + (static_cast<int64_t>(head) * p.head_units + static_cast<int>(source.z) + first) * kUnit;
    int next = steps == 0 ? claim() : 0;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      if (i == max(steps - 2, 0)) next = claim();
      load_query(row, head, sequence, statistics);
      // V may have to wait for the end of the tile before, and what comes behind it with it.
      if (C::kValueStages == 1 && i == (C::kWide ? 0 : min(steps - 1, 1))) load_value(tile);
      load_gradient(row, head, sequence);
      row += C::kRows;
      statistics += kUnit;
      if (++m == count) {  // the next head of the group
        m = 0;
        ++head;
        row -= count * C::kRows;
        statistics += (p.head_units - count) * kUnit;
      }
    }
    if (C::kValueStages == 1 && steps == 0) load_value(tile);
    const bool more = announce(next);
    const BackwardSlot announced = slot_at(slot.stage_before());
    if (!more) return false;
    if constexpr (C::kKeyStages > 1) {
      load_key(announced);
    } else {
      prefetch_keys(&p.key, announced);
    }
    if constexpr (C::kValueStages > 1) {
      load_value(announced);
    } else {
      prefetch_keys(&p.value, announced);
    }
    return true;
  }

  // first: the tile to begin with.
  __device__ __forceinline__ void run(int first) {
    int current = 0;
    bool more = announce(first);
    if (more) load_key(slot_at(current));
    if (C::kValueStages > 1 && more) load_value(slot_at(current));
    ptx::wait_kernel_before();  // the statistics, and through them the sums
    // dQ by itself reads nothing of this kernel: its blocks begin where this one's end.
    if (!C::kSums) ptx::launch_kernel_behind();
    while (more) {
      const BackwardSlot tile = slot_at(current);
      // The last tile of this block: once all have come to theirs, dQ of finished planes is converted where blocks have ended.
      if (C::kTells && ptx::load_shared_volatile(tile.index()) + static_cast<int>(gridDim.x) >= p.tiles)
        ptx::launch_kernel_behind();
      more = feed(tile);
      current = current + 1 == C::kSlots ? 0 : current + 1;
      if (C::kKeyStages == 1 && more) load_key(slot_at(current));
    }
    if (C::kSums) ptx::launch_kernel_behind();
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
