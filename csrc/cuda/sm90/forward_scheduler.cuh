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
  int redo = -1;             // next entry of the redo list, once the grid is exhausted

  // Takes the next tile of the grid.
  __device__ __forceinline__ void claim() {
    if (claimed < 0 && redo < 0) claimed = static_cast<int>(atomicAdd(p.counter, 1u)) + gridDim.x;
  }

  // Describes the next tile in `slot`: tiles of the grid in turn; then one drain; then the tiles that overflowed, safely; then the end.
  __device__ __forceinline__ Kind next(Slot slot) {
    const int safe = overflowed() > 0;
    Kind kind = Kind::kTile;
    int index = -1;
    if (redo < 0) {
      do {
        claim();
        index = claimed;
        claimed = -1;
      } while (index < p.tiles && !decode<C::kRows, C::kKeys, C::kGroups>(p, index, slot));
      if (index >= p.tiles) {
        redo = 0;
        kind = Kind::kDrain;
      }
    } else {
      kind = Kind::kEnd;
      for (const int count = overflowed(); redo < count && kind == Kind::kEnd; ++redo) {
        index = noted(redo);
        bool seen = false;  // several warps may have noted the tile
        for (int i = 0; i < redo; ++i) seen |= noted(i) == index;
        if (!seen && decode<C::kRows, C::kKeys, C::kGroups>(p, index, slot)) kind = Kind::kTile;
      }
    }
    float sink = 0;
    if (p.sinks != nullptr && kind == Kind::kTile) sink = p.sinks[ptx::load_shared_volatile(slot.head())];
    ptx::store_shared(slot.fate(), make_uint4(index, static_cast<uint32_t>(kind), safe, __float_as_uint(sink)));
    if (kind != Kind::kTile) {
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) ptx::store_shared(slot.order(group), static_cast<int>(kind));
    }
    return kind;
  }

  __device__ __forceinline__ int noted(int i) const { return ptx::load_shared_volatile(base + C::kRedoAt + 4 + 4 * i); }
  __device__ __forceinline__ int overflowed() const { return ptx::load_shared_volatile(base + C::kRedoAt); }

  // A tile whenever the producer asks: so late that who claims late claims the better (causal tiles are handed out longest first). Its
  // description stays in the slot until producer and consumers are through with it.
  __device__ __forceinline__ void run() {
    Kind kind = Kind::kTile;
    for (uint32_t asked = 0; kind != Kind::kEnd; asked ^= 1, slot.next()) {
      ptx::wait(barriers.asked(), asked);
      claim();
      ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
      kind = next({base + C::kWorkAt + C::kWorkBytes * slot.stage});
      ptx::arrive(barriers.work_full(slot.stage));
      if (kind == Kind::kDrain) ptx::wait(barriers.drained(), 0);  // all tiles are stored: the redo list is final
    }
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
