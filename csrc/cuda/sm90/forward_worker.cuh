// sm90/forward_worker.cuh: where a consumer warpgroup stands in the pipeline: announced tiles, the rings of Q, K and V, its turn at issuing
// products; and what it passes over.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

template <class C>
struct ForwardWorker {
  const ForwardArguments& p;
  const uint32_t base;
  const Barriers<C> barriers;
  const int group;                          // warpgroup
  const int warp = (threadIdx.x >> 5) & 3;  // in the warpgroup
  const int lane = threadIdx.x & 31;
  Ring<C::kQueries> query;
  Ring<C::kStages> key, value;
  Ring<C::kSlots> slot;

  __device__ __forceinline__ ForwardWorker(const ForwardArguments& p, uint32_t base, Barriers<C> barriers, int group)
      : p(p), base(ptx::uniform(base)), barriers(barriers), group(group) {}

  __device__ __forceinline__ void release(uint32_t barrier) {
    if (lane == 0) ptx::arrive(barrier);
  }

  // The next announced tile: its kind, and the slot that describes it until release_work(), by every lane.
  struct Tile {
    Slot slot;
    uint32_t empty;
    Kind kind;
    int ahead;  // newest blocks of the tile of which this warpgroup sees nothing
  };
  __device__ __forceinline__ Tile fetch() {
    ptx::wait(barriers.work_full(slot.stage), slot.parity);
    const Slot from{base + C::kWorkAt + C::kWorkBytes * slot.stage};
    ptx::fence_products();  // tells ptxas that the warp is together: what REDUX gives then stays uniform, branches on it too
    const int order = ptx::uniform(static_cast<int>(ptx::load_shared_volatile(from.order(group))));
    const Tile tile{from, barriers.work_empty(slot.stage), static_cast<Kind>(order & 3), order >> 2};
    slot.next();
    return tile;
  }
  __device__ __forceinline__ void release_work(const Tile& tile) { ptx::arrive(tile.empty); }

  // Of Q, the one with this warpgroup's rows.
  __device__ __forceinline__ int part() const { return C::kParts == 1 ? 0 : group; }

  // Descriptors of the current stages.
  __device__ __forceinline__ uint64_t describe_query(int offset = 0) const {
    const uint32_t rows = C::kParts == 1 ? group * 64 * 128 : group * C::kPartBytes;
    return ptx::describe_matrix(base + C::kQueryAt + query.stage * C::kQueryBytes + rows + offset, 16, 1024);
  }
  __device__ __forceinline__ uint64_t describe_key() const {
    return ptx::describe_matrix(base + C::kKeyAt + key.stage * C::kKeyBytes, 16, 1024);
  }
  __device__ __forceinline__ uint64_t describe_value() const {
    return ptx::describe_matrix(base + C::kValueAt + value.stage * C::kKeyBytes, C::kKeyPanel, 1024);
  }

  // What the current stages hold has arrived.
  __device__ __forceinline__ void wait_query() { ptx::wait(barriers.query_full(query.stage, part()), query.parity); }
  __device__ __forceinline__ void wait_key() { ptx::wait(barriers.key_full(key.stage), key.parity); }
  __device__ __forceinline__ void wait_value() { ptx::wait(barriers.value_full(value.stage), value.parity); }

  // With one buffer of Q after the last S of a tile; with more there is time until the end of the tile.
  __device__ __forceinline__ void release_query(bool last) {
    if (last) release(barriers.query_empty(query.stage, part()));
  }
  __device__ __forceinline__ void release_key() {
    release(barriers.key_empty(key.stage));
    key.next();
  }
  __device__ __forceinline__ void release_value() {
    release(barriers.value_empty(value.stage));
    value.next();
  }

  // Ping-pong: the issue of products goes round the warpgroups.
  __device__ __forceinline__ void begin_turn() {
    if (C::kTurns) ptx::sync_named(1 + group, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if (C::kTurns) ptx::arrive_named(1 + (group + 1) % C::kGroups, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    begin_turn();
    end_turn();
  }
  // Around all turns: the first is free, and the last is taken, so that no arrival is left over.
  __device__ __forceinline__ void free_first_turn() {
    if (C::kTurns && group == C::kGroups - 1) ptx::arrive_named(1, 256);
  }
  __device__ __forceinline__ void take_last_turn() {
    if (C::kTurns && group == 0) ptx::sync_named(1, 256);
  }

  // Blocks that this warpgroup does not use; the turn of each goes by, so that warpgroups take as many.
  __device__ __forceinline__ void pass_keys(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_key();
      pass_turn();
      release_key();
    }
  }
  __device__ __forceinline__ void pass_values(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_value();
      release_value();
    }
  }

  // A tile in which this warpgroup has no rows. Returns by how much the rings of K and V have to move on: moved in here, they would be
  // kept in vector registers everywhere.
  __device__ __forceinline__ int pass_tile(const Tile& tile) {
    const uint4 place = ptx::load_shared_16(tile.slot.place());
    wait_query();
    release_query(true);
    Ring<C::kStages> k = key, v = value;
#pragma unroll 1
    for (uint32_t block = place.z; block <= place.w; ++block) {
      ptx::wait(barriers.key_full(k.stage), k.parity);
      pass_turn();
      release(barriers.key_empty(k.stage));
      ptx::wait(barriers.value_full(v.stage), v.parity);
      release(barriers.value_empty(v.stage));
      k.next();
      v.next();
    }
    release_work(tile);
    return place.w - place.z + 1;
  }
  __device__ __forceinline__ void advance(int blocks) {
    key.advance(blocks);
    value.advance(blocks);
    query.advance(min(blocks, 1));
  }
};

}  // namespace flash::sm90
