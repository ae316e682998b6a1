// sm90/forward_scheduler.cuh: the scheduler of a block: one thread that claims tiles and describes them. It is not the thread that loads,
// because every cycle in which that one waits for the counter or decodes an index shows in tiles of few blocks.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

template <class C>
struct Scheduler {
  const ForwardArguments& p;
  uint32_t base;
  Barriers<C> barriers;
  Ring<C::kSlots> slot;
  int claimed = blockIdx.x;  // next tile of the grid for this block; -1: to be claimed
  bool exhausted = false;    // the grid has no more tiles

  __device__ __forceinline__ Slot slot_at(int stage) const { return {base + C::kWorkAt + C::kWorkBytes * stage}; }

  // Takes the next tile of the grid.
  __device__ __forceinline__ void claim() {
    if (claimed < 0 && !exhausted) claimed = static_cast<int>(atomicAdd(p.counter, 1u)) + gridDim.x;
  }

  // Describes the next tile of the grid in `to`; after the last, a drain.
  __device__ __forceinline__ Kind next(Slot to) {
    int index;
    do {
      claim();
      index = claimed;
      claimed = -1;
    } while (index < p.tiles && !decode<C::kRows, C::kKeys, C::kGroups>(p, index, to));
    if (index >= p.tiles) {
      exhausted = true;
      return announce(to, Kind::kDrain);
    }
    const float sink = p.sinks == nullptr ? 0.f : p.sinks[ptx::load_shared_volatile(to.head())];
    ptx::store_shared(to.fate(), make_uint4(0, static_cast<uint32_t>(Kind::kTile), 0, __float_as_uint(sink)));
    return Kind::kTile;
  }
  // What is no tile.
  __device__ __forceinline__ Kind announce(Slot to, Kind kind) {
    ptx::store_shared(to.fate(), make_uint4(0, static_cast<uint32_t>(kind), 0, 0));
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) ptx::store_shared(to.order(group), static_cast<int>(kind));
    return kind;
  }

  // Whether the tile that `from` describes, of which all warps have done, overflowed: then it is described in `to`, to be done again.
  __device__ __forceinline__ bool again(Slot from, Slot to) {
    if (ptx::load_shared_volatile(from.overflowed()) == 0) return false;
    ptx::store_shared(from.overflowed(), 0u);
    ptx::store_shared(from.safe(), 1u);
#pragma unroll 1
    for (uint32_t at = 0; at < C::kWorkBytes && from.at != to.at; at += 16)
      ptx::store_shared(to.at + at, ptx::load_shared_16(from.at + at));
    return true;
  }
  // The same for all slots, once there is nothing else on the way.
  __device__ __forceinline__ Kind last(Slot to) {
    if (again(to, to)) return Kind::kTile;
    for (int i = 0; i < C::kSlots; ++i)
      if (again(slot_at(i), to)) return Kind::kTile;
    return announce(to, Kind::kEnd);
  }

  // A tile whenever the producer asks: so late that who claims late claims the better (causal tiles are handed out longest first). Its
  // description stays in the slot until producer and consumers are through with it. A tile that overflowed is done again in the same
  // slot, so that how a tile is done hangs on its own scores alone.
  __device__ __forceinline__ void run() {
    for (int i = 0; i < C::kSlots; ++i) ptx::store_shared(slot_at(i).overflowed(), 0u);
    Kind kind = Kind::kTile;
    for (uint32_t asked = 0; kind != Kind::kEnd; asked ^= 1, slot.next()) {
      ptx::wait(barriers.asked(), asked);
      claim();
      ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
      const Slot to = slot_at(slot.stage);
      kind = exhausted ? last(to) : again(to, to) ? Kind::kTile : next(to);
      ptx::arrive(barriers.work_full(slot.stage));
      if (kind == Kind::kDrain) ptx::wait(barriers.drained(), 0);
    }
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
