// sm90/backward_order.cuh: deterministic dQ beside dK and dV: the tiles of a head take turns, so every sum has one order.
// A tile walks over its blocks of rows, first to last, and passes them on, a few at a time (a turn), once their dQ is added. The tile with
// the keys before follows it: it adds to a block after the tile with the keys behind has passed that on. Both ends of a walk move up with
// the keys, so the tiles that walk over a block are neighbours, and waiting for one's own neighbour is enough. Tiles are handed out in
// that order: whoever is waited for runs, and waits for none that comes later.
// Two threads keep the turns; the warpgroup of dQ neither polls nor fences. A fence waits for all additions under way: thousands of cycles.
//   await     the neighbour has passed on          -> turn      dQ of the turn's blocks may be added
//   pass_on   added, by the warpgroup of dQ        -> noted     and, behind a fence, the tile has passed on
#pragma once
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/backward_work.cuh"

namespace flash::sm90 {

// The last block of the turn that begins with block m, where the tile ends with `last`.
__device__ __forceinline__ int end_of_turn(const BackwardArguments& p, int m, int last) { return min(m | (p.turn - 1), last); }

template <class C>
struct BackwardOrder {
  const BackwardArguments& p;
  uint32_t base;
  BackwardBarriers<C> barriers;
  Ring<C::kSlots> slot;
  Ring<C::kTurnStages> turn;

  struct Tile {
    Steps steps, before;               // blocks of rows that see it; that see the neighbour, which comes before it
    unsigned *passed, *passed_before;  // [group]
    int plane;
  };

  // The next announced tile; false: there is none.
  __device__ __forceinline__ bool fetch(Tile* tile) {
    ptx::wait(barriers.work_full(slot.stage), slot.parity);
    const BackwardSlot from{base + C::kWorkAt + C::kWorkBytes * slot.stage};
    const int index = ptx::load_shared_volatile(from.index());
    const uint4 place = ptx::load_shared_16(from.place()), sequence = ptx::load_shared_16(from.sequence());
    ptx::arrive(barriers.work_empty(slot.stage));
    slot.next();
    if (index >= p.tiles) return false;
    const Place where = place_of<true>(p, index);
    const int behind = static_cast<int>(place.x) + C::kKeys;
    tile->steps = {static_cast<int>(place.z), static_cast<int>(place.w)};
    tile->before = viewers<C::kRows>(p, static_cast<int>(sequence.x), static_cast<int>(sequence.y), behind, behind + C::kKeys);
    tile->passed = p.passed + (static_cast<int64_t>(where.plane) * p.key_tiles + where.piece) * p.group;
    tile->passed_before = tile->passed + p.group;
    tile->plane = where.plane;
    return true;
  }

  // keep(head of the group, last block) for every turn of a tile.
  template <class Keep>
  __device__ __forceinline__ void for_each_turn(const Tile& tile, const Keep& keep) {
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int m = tile.steps.first, end; m <= tile.steps.last; m = end + 1) {
        end = end_of_turn(p, m, tile.steps.last);
        keep(head, end);
        turn.next();
      }
    }
  }

  __device__ __forceinline__ void await() {
    ptx::wait_kernel_before();  // which clears what is passed on
    for (Tile tile; fetch(&tile);) {
      for_each_turn(tile, [&](int head, int end) {
        ptx::wait(barriers.noted(turn.stage), turn.parity ^ 1);
        if (const int common = min(end, tile.before.last); common >= tile.before.first) {
          while (ptx::load_acquire(tile.passed_before + head) <= static_cast<unsigned>(common)) __nanosleep(20);
        }
        ptx::arrive(barriers.turn(turn.stage));
      });
    }
  }

  __device__ __forceinline__ void pass_on() {
    for (Tile tile; fetch(&tile);) {
      for_each_turn(tile, [&](int head, int end) {
        ptx::wait(barriers.added(turn.stage), turn.parity);
        ptx::arrive(barriers.noted(turn.stage));
        ptx::store_release(tile.passed + head, static_cast<unsigned>(end + 1));
      });
      ptx::add_release(p.finished + tile.plane, 1);
    }
  }
};

}  // namespace flash::sm90
