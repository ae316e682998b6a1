// sm90/backward_counter.cuh: the thread that counts the tiles of a plane whose dQ is added, so that the kernel behind converts dQ of
// finished planes while the last tiles are computed elsewhere. A fence per tile, by a thread that has nothing else to do.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"

namespace flash::sm90 {

template <class C>
struct BackwardCounter {
  const BackwardArguments& p;
  uint32_t base;
  BackwardBarriers<C> barriers;
  Ring<C::kSlots> slot;

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::wait(barriers.work_full(slot.stage), slot.parity);
      const BackwardSlot tile{base + C::kWorkAt + C::kWorkBytes * slot.stage};
      const int index = ptx::load_shared_volatile(tile.index());
      if (index >= p.tiles) break;
      ptx::wait(barriers.summed(slot.stage), slot.parity);
      ptx::arrive(barriers.work_empty(slot.stage));
      ptx::add_release(p.finished + place_of<C::kTurns>(p, index).plane, 1);
      slot.next();
    }
  }
};

}  // namespace flash::sm90
