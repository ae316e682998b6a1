// sm90/forward_stream_feed.cuh: the two threads that feed the warpgroups of a stream: one loads K and V, one gives orders and loads Q.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/forward_stream.cuh"
#include "cuda/sm90/panels.cuh"

namespace flash::sm90 {

template <class C>
struct StreamProducer {
  const StreamArguments& p;
  uint32_t base;
  Barriers<C> barriers;
  Ring<C::kStages> key, value;

  // Row, head and sequence of a block of keys in the maps; row -1: none.
  struct Element {
    int row, head, batch;
  };
  Element owed{-1, 0, 0};  // the element whose V is still to be loaded

  __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t to, uint32_t full, const Element& from) {
    ptx::arrive_expecting(full, C::kKeyBytes);
    load_panels<C::kPanels>(to, C::kKeyPanel, map, full, from.row, from.head, from.batch, 0);
  }
  __device__ __forceinline__ void load_value() {
    if (owed.row < 0) return;
    ptx::wait(barriers.value_empty(value.stage), value.parity ^ 1);
    load(&p.call.value, base + C::kValueAt + value.stage * C::kKeyBytes, barriers.value_full(value.stage), owed);
    value.next();
    owed.row = -1;
  }
  // K of each element, newest first, and V of the one before.
  __device__ __forceinline__ void load_elements(int plane, const Blocks& blocks) {
    const int batch = p.call.heads.divide(plane), head = p.call.group.divide(plane - batch * p.call.heads.value());
#pragma unroll 1
    for (int block = blocks.last; block >= blocks.first; --block) {
      const Element element{block * C::kKeys, head, batch};
      ptx::wait(barriers.key_empty(key.stage), key.parity ^ 1);
      load(&p.call.key, base + C::kKeyAt + key.stage * C::kKeyBytes, barriers.key_full(key.stage), element);
      key.next();
      load_value();
      owed = element;
    }
  }

  __device__ __forceinline__ void run() {
    Walks walks(p.stream, blockIdx.x);
    Stretch stretch;
    while (walks.next(&stretch))
      if (!stretch.empty()) load_elements(stretch.plane, elements_of(p.stream, walks, stretch));
    load_value();
    ptx::wait(barriers.drained(), 0);
    for_each_overflow<C>(p.stream, base, [&](int, int plane, int band, int) { load_elements(plane, p.stream.blocks(band)); });
    load_value();
  }
};

template <class C>
struct StreamScheduler {
  const StreamArguments& p;
  uint32_t base;
  Barriers<C> barriers;

  // Per warpgroup, in shared memory, since an array that is indexed would be in local memory: orders given, buffers of Q filled, and the
  // element that comes after all it was told of.
  __device__ __forceinline__ uint32_t orders(int group) const { return base + C::kCountsAt + 16 * group; }
  __device__ __forceinline__ uint32_t queries(int group) const { return orders(group) + 4; }
  __device__ __forceinline__ uint32_t element(int group) const { return orders(group) + 8; }
  __device__ __forceinline__ int count(uint32_t counter) {
    const int before = ptx::load_shared_volatile(counter);
    ptx::store_shared(counter, static_cast<uint32_t>(before + 1));
    return before;
  }

  // An order: `describe` writes what else there is to say into the slot.
  template <class Describe>
  __device__ __forceinline__ void order(int group, Kind kind, int skip, Describe describe) {
    const int given = count(orders(group)), slot = given % C::kSlots;
    ptx::wait(barriers.work_empty(group, slot), (given / C::kSlots & 1) ^ 1);
    const Slot to{base + C::kWorkAt + C::kWorkBytes * (group * C::kSlots + slot)};
    describe(to);
    ptx::store_shared(to.order(0), static_cast<uint32_t>(skip * 4 + static_cast<int>(kind)));
    ptx::arrive(barriers.work_full(group, slot));
  }
  __device__ __forceinline__ void order(int group, Kind kind, int skip) {
    order(group, kind, skip, [](Slot) {});
  }

  __device__ __forceinline__ void order_tile(int group, int skip, int number, int plane, int band, bool safe) {
    const int batch = p.call.heads.divide(plane), head = plane - batch * p.call.heads.value(), row = band * kBand;
    order(group, Kind::kTile, skip, [&](Slot to) {
      const Blocks blocks = p.stream.blocks(band);
      const float sink = p.call.sinks == nullptr ? 0.f : p.call.sinks[head];
      ptx::store_shared(to.place(), make_uint4(row, head, blocks.first, blocks.last));
      ptx::store_shared(to.sequence(), make_uint4(p.stream.rows, p.stream.keys, 0, batch));
      ptx::store_shared(to.fate(), make_uint4(number, static_cast<uint32_t>(Kind::kTile), safe, __float_as_uint(sink)));
    });
    const int filled = count(queries(group)), buffer = filled % C::kQueries;
    ptx::wait(barriers.query_empty(buffer, group), (filled / C::kQueries & 1) ^ 1);
    const uint32_t full = barriers.query_full(buffer, group),
                   to = base + C::kQueryAt + buffer * C::kQueryBytes + group * C::kPartBytes;
    ptx::arrive_expecting(full, C::kPartBytes);
    load_panels<C::kPanels>(to, C::kQueryPanel, &p.call.query, full, row, head, batch, 0);
  }

  // Tiles in the order in which they start. What is left of a stretch after a warpgroup's last tile, it passes before others go on: their
  // next tiles wait for the Q before, which they release further down.
  __device__ __forceinline__ void run() {
    for (int group = 0; group < C::kGroups; ++group) ptx::store_shared(orders(group), make_uint4(0, 0, 0, 0));
    Walks walks(p.stream, blockIdx.x);
    Stretch stretch;
    int number = 0, elements = 0;
    while (walks.next(&stretch)) {
      if (stretch.empty()) continue;
      const Blocks all = elements_of(p.stream, walks, stretch);
#pragma unroll 1
      for (int i = stretch.to - 1; i >= stretch.from; --i, ++number) {
        const int group = walks.group(i), band = walks.band(i);
        const Blocks blocks = p.stream.blocks(band);
        const int start = elements + all.last - blocks.last, skip = start - ptx::load_shared_volatile(element(group));
        ptx::store_shared(element(group), static_cast<uint32_t>(start + blocks.count()));
        order_tile(group, skip, number, stretch.plane, band, false);
      }
      elements += all.count();
#pragma unroll 1
      for (int group = 0; group < C::kGroups; ++group) {
        const int skip = elements - ptx::load_shared_volatile(element(group));
        ptx::store_shared(element(group), static_cast<uint32_t>(elements));
        if (skip > 0) order(group, Kind::kPass, skip);
      }
    }
    for (int group = 0; group < C::kGroups; ++group) order(group, Kind::kDrain, 0);
    ptx::wait(barriers.drained(), 0);
    for_each_overflow<C>(p.stream, base, [&](int which, int plane, int band, int owner) {
#pragma unroll 1
      for (int group = 0; group < C::kGroups; ++group)
        if (group != owner) order(group, Kind::kPass, p.stream.blocks(band).count());
      order_tile(owner, 0, which, plane, band, true);
    });
    for (int group = 0; group < C::kGroups; ++group) order(group, Kind::kEnd, 0);
  }
};

}  // namespace flash::sm90
