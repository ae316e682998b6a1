// sm90/forward_stream.cuh: attention forward on Hopper, windows of long sequences. As in forward.cuh, but each warpgroup has tiles of its
// own, in the order of forward_stream.h: while one stores its output and takes the maxima of its next tile, the others are within theirs
// and keep the tensor cores busy. In forward.cuh the ring of K and V holds them together: the keys of the next tile are others than
// those the last one ended with, so nobody can start on them who is more than the ring's stages ahead of the slowest.
//
// Elements of the stream, a block of keys and its values, go through the rings of K and V in order. Each warpgroup uses those of its
// tile and passes the others over. What it is told: how many to pass, then what to do: a tile, or nothing.
//
// Who tells: the scheduler computes tiles and elements from the same walks as the producer that loads them; no counter, no messages.
// It loads Q as well, each time the warpgroup whose tile starts next has done with the Q before. Tiles whose sums overflowed are done
// again at the end, one after the other.
//
// Not measured yet. By a model of queues (16k tokens, 1024 keys) dim 128 gains 5 to 7 %, if two warpgroups fill the tensor cores as well
// as three, which they do in dense attention; dim 64 between -7 and +7 %; 4k tokens lose. Dim 256 would lose: two warpgroups and two
// stages leave the other nothing to go on with.
#pragma once
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_stream_launch.cuh"

namespace flash::sm90 {

template <class T, int kVariant>
struct StreamConfig : ForwardConfig<T, kVariant, false> {
  using Base = ForwardConfig<T, kVariant, false>;
  static_assert(Base::kStream && !Base::kTurns && Base::kKeys == kBand && Base::kParts == Base::kGroups);
  static constexpr int kSlots = 2;  // of each warpgroup's orders: a tile that is computed or stored, and what comes next
  static constexpr uint32_t kCountsAt =
      Base::kWorkAt + Base::kGroups * kSlots * Base::kWorkBytes;  // of the scheduler, 16 bytes a warpgroup
  static constexpr uint32_t kOverflowsAt = kCountsAt + Base::kGroups * 16, kOverflowBytes = kMostBands / 8;
  static constexpr uint32_t kBarriersAt = kOverflowsAt + kOverflowBytes;
  static constexpr uint32_t kSharedBytes =
      kBarriersAt + 8 * (2 * Base::kQueries * Base::kParts + 4 * Base::kStages + 2 * kSlots * Base::kGroups + 1);
  static_assert(kSharedBytes <= 227 * 1024);

  static __device__ __forceinline__ int rows_before(int) { return 0; }
  // A bit for each tile, since slots are used again before it is done again.
  static __device__ __forceinline__ void note_overflow(uint32_t base, Slot slot) {
    const uint32_t number = ptx::load_shared_volatile(slot.number());
    ptx::or_shared(base + kOverflowsAt + number / 32 * 4, 1u << number % 32);
  }
};

// As the other Barriers, but slots are a warpgroup's own.
template <class C>
  requires(C::kStream)
struct Barriers<C> {
  uint32_t base;
  __device__ __forceinline__ uint32_t query_full(int i, int part) const { return base + 8 * (i * C::kParts + part); }
  __device__ __forceinline__ uint32_t query_empty(int i, int part) const { return query_full(C::kQueries + i, part); }
  __device__ __forceinline__ uint32_t key_full(int i) const { return query_full(2 * C::kQueries, i); }
  __device__ __forceinline__ uint32_t key_empty(int i) const { return key_full(C::kStages + i); }
  __device__ __forceinline__ uint32_t value_full(int i) const { return key_full(2 * C::kStages + i); }
  __device__ __forceinline__ uint32_t value_empty(int i) const { return key_full(3 * C::kStages + i); }
  __device__ __forceinline__ uint32_t work_full(int group, int i) const {
    return key_full(4 * C::kStages + group * C::kSlots + i);
  }
  __device__ __forceinline__ uint32_t work_empty(int group, int i) const { return work_full(C::kGroups + group, i); }
  __device__ __forceinline__ uint32_t drained() const { return work_full(2 * C::kGroups, 0); }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * C::kGroups;
    for (int i = 0; i < C::kQueries * C::kParts; ++i) init_stage(query_full(0, i), 1, query_empty(0, i), 4);
    for (int i = 0; i < C::kStages; ++i) {
      init_stage(key_full(i), 1, key_empty(i), kWarps);
      init_stage(value_full(i), 1, value_empty(i), kWarps);
    }
    for (int i = 0; i < C::kGroups * C::kSlots; ++i) init_stage(work_full(0, i), 1, work_empty(0, i), 128);
    ptx::init_barrier(drained(), 32 * kWarps);
    ptx::fence_barrier_init();
  }
};

// Key blocks of the part of a plane that a stretch covers, newest first: the elements it adds to the stream.
__device__ __forceinline__ Blocks elements_of(const Stream& stream, const Walks& walks, const Stretch& stretch) {
  return {stream.blocks(walks.band(stretch.from)).first, stream.blocks(walks.band(stretch.to - 1)).last};
}

// Calls f(number of the tile in the block, plane, band, its warpgroup) for every tile, in order, that has to be done again.
template <class C, class F>
__device__ __forceinline__ void for_each_overflow(const Stream& stream, uint32_t base, F f) {
  Walks walks(stream, blockIdx.x);
  Stretch stretch;
  int number = 0;
  while (walks.next(&stretch)) {
#pragma unroll 1
    for (int i = stretch.to - 1; i >= stretch.from; --i, ++number) {
      const uint32_t bits = ptx::load_shared_volatile(base + C::kOverflowsAt + number / 32 * 4);
      if (bits >> number % 32 & 1) f(number, stretch.plane, walks.band(i), walks.group(i));
    }
  }
}

}  // namespace flash::sm90
