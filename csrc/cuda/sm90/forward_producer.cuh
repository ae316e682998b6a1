// sm90/forward_producer.cuh: the producer of a block: one thread that fetches tiles and feeds Q, K and V through TMA.
// It runs ahead of the consumers as far as the buffers let it, across tiles: K of the next tile is loaded before the last V of this one.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

template <class C>
struct Producer {
  const ForwardArguments& p;
  uint32_t base;
  Barriers<C> barriers;
  Ring<C::kQueries> query;
  Ring<C::kStages> key, value;
  Ring<C::kSlots> slot;
  int claimed = blockIdx.x;  // next tile of the grid for this block; -1: to be claimed
  int redo = -1;             // next entry of the redo list, once the grid is exhausted

  __device__ __forceinline__ Slot slot_at(int stage) const { return {base + C::kWorkAt + C::kWorkBytes * stage}; }

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
    ptx::store_shared(slot.fate(), make_uint4(index, static_cast<uint32_t>(kind), safe, 0));
    if (kind != Kind::kTile) {
#pragma unroll
      for (int group = 0; group < C::kGroups; ++group) ptx::store_shared(slot.order(group), static_cast<int>(kind));
    }
    return kind;
  }

  // Takes the next tile of the grid. Early enough before next(), the round trip to the counter is hidden.
  __device__ __forceinline__ void claim() {
    if (claimed < 0 && redo < 0) claimed = static_cast<int>(atomicAdd(p.counter, 1u)) + gridDim.x;
  }

  __device__ __forceinline__ int noted(int i) const { return ptx::load_shared_volatile(base + C::kRedoAt + 4 + 4 * i); }
  __device__ __forceinline__ int overflowed() const { return ptx::load_shared_volatile(base + C::kRedoAt); }

  // Tells the consumers about the next tile; its description stays in slot `announced` until they have stored it.
  __device__ __forceinline__ Kind announce_next() {
    ptx::wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
    const Kind kind = next(slot_at(slot.stage));
    ptx::arrive(barriers.work_full(slot.stage));
    slot.next();
    return kind;
  }

  // Into L2, what the tile in slot `announced` is the first to read: of plane after plane of equal tiles each fetches a share of the
  // keys, of causal ones the last tile, which is handed out first, the newest of them. Loads of short sequences come from DRAM otherwise.
  __device__ __forceinline__ void prefetch(int announced) {
    const Slot tile = slot_at(announced);
    const uint4 place = ptx::load_shared_16(tile.place());
    const int row = static_cast<int>(place.x), first = static_cast<int>(place.z), last = static_cast<int>(place.w);
    int block, step;
    if (p.uneven) {
      if (row + C::kRows < static_cast<int>(ptx::load_shared_volatile(tile.sequence()))) return;
      block = max(first, last - kAhead + 1), step = 1;
    } else {
      step = p.row_tiles.value(), block = first + row / C::kRows;
    }
    const uint4 from = ptx::load_shared_16(tile.source());
#pragma unroll 1
    for (; block <= last; block += step) {
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        const ptx::Box box{64 * panel, static_cast<int>(from.y) + block * C::kKeys, static_cast<int>(from.x),
                           static_cast<int>(from.z), static_cast<int>(from.w)};
        ptx::prefetch_box(&p.key, box);
        ptx::prefetch_box(&p.value, box);
      }
    }
  }
  static constexpr int kAhead = 8;  // blocks

  __device__ __forceinline__ void prefetch_query(int announced) {
    const Slot from = slot_at(announced);
    const uint4 place = ptx::load_shared_16(from.place()), sequence = ptx::load_shared_16(from.sequence());
    const int row = static_cast<int>(sequence.z + place.x), wrap = ptx::load_shared_volatile(from.source() + 12);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      ptx::prefetch_box(&p.query, {64 * panel, row, static_cast<int>(place.y), static_cast<int>(sequence.w), wrap});
  }

  __device__ __forceinline__ void load_query(int announced) {
    ptx::wait(barriers.query_empty(query.stage), query.parity ^ 1);
    const uint32_t full = barriers.query_full(query.stage), query_at = base + C::kQueryAt + query.stage * C::kQueryBytes;
    const Slot from = slot_at(announced);
    const uint4 place = ptx::load_shared_16(from.place()), sequence = ptx::load_shared_16(from.sequence());
    const int row = static_cast<int>(sequence.z + place.x), wrap = ptx::load_shared_volatile(from.source() + 12);
    ptx::arrive_expecting(full, C::kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      ptx::load_box(query_at + panel * C::kQueryPanel, &p.query, full,
                    {64 * panel, row, static_cast<int>(place.y), static_cast<int>(sequence.w), wrap});
    query.next();
  }

  // A block of K or V of the tile announced in slot `announced`.
  __device__ __forceinline__ void load_block(const CUtensorMap* map, uint32_t to, uint32_t full, int block, int announced) {
    const uint4 from = ptx::load_shared_16(slot_at(announced).source());
    const int row = static_cast<int>(from.y) + block * C::kKeys;
    ptx::arrive_expecting(full, C::kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      ptx::load_box(to + panel * C::kKeyPanel, map, full,
                    {64 * panel, row, static_cast<int>(from.x), static_cast<int>(from.z), static_cast<int>(from.w)});
  }
  __device__ __forceinline__ void load_key(int block, int announced) {
    ptx::wait(barriers.key_empty(key.stage), key.parity ^ 1);
    load_block(&p.key, base + C::kKeyAt + key.stage * C::kKeyBytes, barriers.key_full(key.stage), block, announced);
    key.next();
  }
  __device__ __forceinline__ void load_value(int block, int announced) {
    ptx::wait(barriers.value_empty(value.stage), value.parity ^ 1);
    load_block(&p.value, base + C::kValueAt + value.stage * C::kKeyBytes, barriers.value_full(value.stage), block, announced);
    value.next();
  }

  // Everything this block needs, in the order in which consumers need it. Each part is in the code once: a tile of no blocks stands
  // for the start and for a drain.
  __device__ __forceinline__ void run() {
    int announced = C::kSlots - 1, before = 0;  // slots of the current tile and of the one before
    int owed = -1;                              // first block of the tile before, if its V is still to be loaded
    bool begun = false;
    Kind kind = Kind::kDrain;
    while (true) {
      int first = 0, last = 0;
      if (kind == Kind::kTile) {
        const uint4 tile = ptx::load_shared_16(slot_at(announced).place());
        first = static_cast<int>(tile.z), last = static_cast<int>(tile.w);
        load_key(last, announced);
      }
      if (owed >= 0) load_value(owed, before);
      if (!C::kEarly && kind == Kind::kTile) load_query(announced);
      if (kind == Kind::kEnd) break;
      owed = kind == Kind::kTile ? first : -1;
      if (kind == Kind::kDrain && begun) ptx::wait(barriers.drained(), 0);  // all tiles are stored: the redo list is final
      begun = true;
      before = announced;
      announced = announced + 1 == C::kSlots ? 0 : announced + 1;
      // The next tile is announced a few blocks before the end of this one, so early that its Q is there in time and as late as that:
      // who claims late claims the better (causal tiles are handed out longest first). With one buffer of Q, which this tile still
      // reads, Q waits in L2 until then.
      const int lead = max(min(last - 2, first + 3), first - 1);
#pragma unroll 1
      for (int block = last - 1;; --block) {
        if (block == min(lead + 1, last - 1)) claim();
        if (block == lead) {
          kind = announce_next();
          if (kind == Kind::kTile) {
            if (C::kEarly) load_query(announced);
            prefetch(announced);
            if (!C::kEarly) prefetch_query(announced);
          }
        }
        if (block < first) break;
        load_key(block, before);
        load_value(block + 1, before);
      }
    }
    __threadfence();
    if (atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;
  }
};

}  // namespace flash::sm90
