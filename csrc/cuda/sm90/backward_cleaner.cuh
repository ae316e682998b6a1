// sm90/backward_cleaner.cuh: the thread that sets the sums of dQ to zero, shortly before they are added to: in L2 they then stay, where
// a kernel before would write them to memory and the first addition would read them back.
// The sums of a plane are cut into as many slices as it has tiles. Who takes tile i clears the slice of tile i + ahead; the planes before
// those are cleared by the kernel before. A tile is added to when all slices of its plane are cleared.
#pragma once
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"

namespace flash::sm90 {

template <class C>
struct BackwardCleaner {
  const BackwardArguments& p;
  uint32_t base;
  BackwardBarriers<C> barriers;
  Ring<C::kSlots> slot;

  // Issues the stores of a slice.
  __device__ __forceinline__ void begin(int index) const {
    if (index >= p.tiles) return;
    const Place place = place_of<C::kTurns>(p, index);
    const int64_t first = static_cast<int64_t>(place.piece) * p.slice_bytes;
    char* to = reinterpret_cast<char*>(p.dquery) + place.plane * p.plane_bytes + first;
    int left = static_cast<int>(min(static_cast<int64_t>(p.slice_bytes), p.plane_bytes - first));
#pragma unroll 1
    for (; left > 0; left -= C::kZeroBytes, to += C::kZeroBytes)
      ptx::store_bytes(to, base + C::kZeroAt, min(left, static_cast<int>(C::kZeroBytes)));
    ptx::commit_stores();
  }

  // Waits for all stores.
  __device__ __forceinline__ void wait() const {
    ptx::wait_stores<0>();
    ptx::fence_async_proxy_global();
    __threadfence();
  }

  __device__ __forceinline__ void count(int index) const {
    if (index < p.tiles) atomicAdd(p.cleared + place_of<C::kTurns>(p, index).plane, 1u);
  }

  __device__ __forceinline__ void run() {
    const int ahead = p.ahead;
    ptx::wait_kernel_before();
    while (true) {
      ptx::wait(barriers.work_full(slot.stage), slot.parity);
      const BackwardSlot tile{base + C::kWorkAt + C::kWorkBytes * slot.stage};
      const int index = ptx::load_shared_volatile(tile.index());
      ptx::arrive(barriers.work_empty(slot.stage));
      if (index >= p.tiles) break;
      // Slices that this waits for are of tiles before: those wait for none of this one.
      const unsigned* cleared = p.cleared + place_of<C::kTurns>(p, index).plane;
      while (ptx::load_acquire(cleared) < static_cast<unsigned>(p.key_tiles)) __nanosleep(100);
      ptx::arrive(barriers.cleared(slot.stage));
      slot.next();
      begin(ahead + index);
      wait();
      count(ahead + index);
    }
  }
};

}  // namespace flash::sm90
