// sm90/forward_producer.cuh: the producer of a block: one thread that feeds Q, K and V of the announced tiles through TMA.
// It runs ahead of the consumers as far as the buffers let it, across tiles: K of the next tile is loaded before the last V of this one.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/panels.cuh"

namespace flash::sm90 {

template <class C>
struct Producer {
  const ForwardArguments& p;
  uint32_t base;
  Barriers<C> barriers;
  Ring<C::kQueries> query;
  Ring<C::kStages> key, value;
  Ring<C::kSlots> slot;  // of the next tile

  __device__ __forceinline__ Slot slot_at(int stage) const { return {base + C::kWorkAt + C::kWorkBytes * stage}; }

  // Asks for the next tile; take() waits until it is announced.
  __device__ __forceinline__ void ask() { ptx::arrive(barriers.asked()); }
  __device__ __forceinline__ Kind take() {
    ptx::wait(barriers.work_full(slot.stage), slot.parity);
    const Kind kind = static_cast<Kind>(ptx::load_shared_volatile(slot_at(slot.stage).kind()));
    if (C::kEarly && kind == Kind::kTile) load_query(slot.stage);
    return kind;
  }

  __device__ __forceinline__ void load_query(int tile) {
    const Slot from = slot_at(tile);
    const uint4 place = ptx::load_shared_16(from.place()), sequence = ptx::load_shared_16(from.sequence());
    const int row = static_cast<int>(sequence.z + place.x), wrap = ptx::load_shared_volatile(from.source() + 12);
#pragma unroll 1
    for (int part = 0; part < C::kParts; ++part) {
      ptx::wait(barriers.query_empty(query.stage, part), query.parity ^ 1);
      const uint32_t full = barriers.query_full(query.stage, part);
      const uint32_t to = base + C::kQueryAt + query.stage * C::kQueryBytes + part * C::kPartBytes;
      ptx::arrive_expecting(full, C::kPartBytes);
      load_panels<C::kPanels>(to, C::kQueryPanel, &p.query, full, row + part * (C::kRows / C::kParts),
                              static_cast<int>(place.y), static_cast<int>(sequence.w), wrap);
    }
    query.next();
  }

  // A block of K or V of the tile in a slot.
  __device__ __forceinline__ void load_block(const CUtensorMap* map, uint32_t to, uint32_t full, int block, int tile) {
    const uint4 from = ptx::load_shared_16(slot_at(tile).source());
    const int row = static_cast<int>(from.y) + block * C::kKeys;
    ptx::arrive_expecting(full, C::kKeyBytes);
    load_panels<C::kPanels>(to, C::kKeyPanel, map, full, row, static_cast<int>(from.x), static_cast<int>(from.z),
                            static_cast<int>(from.w));
  }
  __device__ __forceinline__ void load_key(int block, int tile) {
    ptx::wait(barriers.key_empty(key.stage), key.parity ^ 1);
    load_block(&p.key, base + C::kKeyAt + key.stage * C::kKeyBytes, barriers.key_full(key.stage), block, tile);
    key.next();
  }
  __device__ __forceinline__ void load_value(int block, int tile) {
    ptx::wait(barriers.value_empty(value.stage), value.parity ^ 1);
    load_block(&p.value, base + C::kValueAt + value.stage * C::kKeyBytes, barriers.value_full(value.stage), block, tile);
    value.next();
  }

  // Everything this block needs, in the order in which consumers need it. Each part is in the code once: a tile of no blocks stands
  // for a drain.
  __device__ __forceinline__ void run() {
    ask();
    Kind kind = take();
    int before = 0, owed = -1;  // slot of the tile before and its first block, if its V is still to be loaded
    while (true) {
      const int tile = slot.stage;
      int first = 0, last = 0;
      if (kind == Kind::kTile) {
        const uint4 place = ptx::load_shared_16(slot_at(tile).place());
        first = static_cast<int>(place.z), last = static_cast<int>(place.w);
      }
      // The next tile is asked for a few blocks before the end of this one, so early that its Q is there in time and as late as that.
      const int lead = max(min(last - 2, first + 3), first - 1), early = lead + 1 >= last - 1;
      if (early && kind != Kind::kEnd) ask();
      if (kind == Kind::kTile) load_key(last, tile);
      if (owed >= 0) {
        load_value(owed, before);
        ptx::arrive(barriers.work_empty(before));
      }
      if (kind == Kind::kEnd) break;
      owed = -1;
      if (kind == Kind::kTile) {
        if (!C::kEarly) load_query(tile);
        owed = first;
      } else {
        ptx::arrive(barriers.work_empty(tile));
      }
      before = tile;
      slot.next();
#pragma unroll 1
      for (int block = last - 1;; --block) {
        if (!early && block == lead + 1) ask();
        if (block == lead) kind = take();
        if (block < first) break;
        load_key(block, before);
        load_value(block + 1, before);
      }
    }
  }
};

}  // namespace flash::sm90
