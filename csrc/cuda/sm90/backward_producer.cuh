// sm90/backward_producer.cuh: the producer of a block: one thread that fetches tiles and feeds K, V, Q, dO and the statistics by TMA.
// It runs ahead of the others as far as the buffers let it, across tiles.
#pragma once
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"

namespace flash::sm90 {

template <class C>
struct BackwardProducer {
  // Steps of a tile before the next one may be claimed: the next K takes the place of one that is stored through when the second step
  // of this tile is under way.
  static constexpr int kAhead = 3;
  const BackwardArguments& p;
  uint32_t base;
  BackwardBarriers<C> barriers;
  Ring<C::kQueries> query;
  Ring<C::kGradients> gradient;
  Ring<C::kKeyStages> key;
  Ring<C::kValueStages> value;
  Ring<C::kSlots> slot;
  int claimed = -1;  // last tile taken from the grid

  __device__ __forceinline__ BackwardSlot slot_at(int stage) const { return {base + C::kWorkAt + C::kWorkBytes * stage}; }

  // Tells the others about the next tile; false: that there is none.
  __device__ __forceinline__ bool announce_next() {
    ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
    const BackwardSlot to = slot_at(slot.stage);
    do {
      claimed = claimed < 0 ? blockIdx.x : static_cast<int>(atomicAdd(p.counter, 1u)) + gridDim.x;
    } while (claimed < p.tiles && !decode<C::kRows, C::kKeys>(p, claimed, to));
    ptx::store_shared(to.index(), claimed);
    ptx::arrive(barriers.work_full(slot.stage));
    slot.next();
    return claimed < p.tiles;
  }

  template <uint32_t kPanelBytes>
  __device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, uint32_t full, int row, int head, int sequence) {
    const int wrap = p.cu_seqlens_q != nullptr ? kWrap : 0;
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      ptx::load_box(to + panel * kPanelBytes, map, full, {64 * panel, row, head, sequence, wrap});
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap* map, uint32_t to, uint32_t full, BackwardSlot tile) {
    const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
    ptx::arrive_expecting(full, C::kKeyBytes);
    load<C::kKeyPanel>(to, map, full, static_cast<int>(sequence.z + place.x), static_cast<int>(place.y),
                       static_cast<int>(sequence.w));
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

  // Loads what a tile needs and, early enough, announces the next; returns whether there is one.
  __device__ __forceinline__ bool feed(BackwardSlot tile) {
    const uint4 place = ptx::load_shared_16(tile.place()), source = ptx::load_shared_16(tile.source());
    const int first = static_cast<int>(place.z), count = static_cast<int>(place.w) - first + 1;
    const int steps = count * p.group, sequence = static_cast<int>(source.y);
    int head = static_cast<int>(place.y) * p.group, m = 0;
    int row = static_cast<int>(source.x) + first * C::kRows;
    constexpr int kUnit = C::kStatisticsBytes / 16;
    const uint4* statistics =
        p.statistics + (static_cast<int64_t>(head) * p.head_units + static_cast<int>(source.z) + first) * kUnit;
    bool more = true;
#pragma unroll 1
    for (int i = 0;; ++i) {
      // As late as the latency of the claim and of K allow (the others are up to three steps behind): blocks that are nearly done get
      // the next tile, and not those that began first.
      if (i == max(min(steps, kAhead), steps - 1)) {
        more = announce_next();
        const BackwardSlot next = slot_at(slot.stage_before());
        if (C::kKeyStages > 1 && more) load_key(next);
        if (C::kValueStages > 1 && more) load_value(next);
      }
      if (i >= steps) break;
      load_query(row, head, sequence, statistics);
      if (C::kValueStages == 1 && i == 0) load_value(tile);
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
    return more;
  }

  __device__ __forceinline__ void run() {
    int current = 0;
    bool more = announce_next();
    if (more) load_key(slot_at(current));
    if (C::kValueStages > 1 && more) load_value(slot_at(current));
    ptx::wait_kernel_before();  // the statistics, and through them the sums
    while (more) {
      more = feed(slot_at(current));
      current = current + 1 == C::kSlots ? 0 : current + 1;
      if (C::kKeyStages == 1 && more) load_key(slot_at(current));
    }
    ptx::launch_kernel_behind();
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
