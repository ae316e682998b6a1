// sm90/forward_stream_consumer.cuh: a consumer warpgroup of a stream: its tiles, one after the other, and the elements between them.
#pragma once
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_stream.cuh"

namespace flash::sm90 {

template <class C>
struct StreamConsumer : Consumer<C> {
  using Base = Consumer<C>;
  using Base::barriers, Base::base, Base::group, Base::key, Base::lane, Base::query, Base::slot, Base::value;
  using typename Base::Tile;
  using typename Base::Walk;

  using Base::Base;

  // An order: the elements to pass before the tile, if it is one.
  struct Order {
    Tile tile;
    int skip;
  };
  __device__ __forceinline__ Order fetch() {
    ptx::wait(barriers.work_full(group, slot.stage), slot.parity);
    const Slot from{base + C::kWorkAt + C::kWorkBytes * (group * C::kSlots + slot.stage)};
    ptx::fence_products();  // see ForwardWorker::fetch()
    const int word = ptx::uniform(static_cast<int>(ptx::load_shared_volatile(from.order(0))));
    const Order order{{from, barriers.work_empty(group, slot.stage), static_cast<Kind>(word & 3), 0}, word >> 2};
    slot.next();
    return order;
  }

  // K and V in turn, as they come: there may be more elements than stages.
  __device__ __forceinline__ void pass(int elements) {
#pragma unroll 1
    for (; elements > 0; --elements) {
      Base::pass_keys(1);
      Base::pass_values(1);
    }
  }

  // With two buffers of Q: S of the next tile runs beside the last P V and the output of this one. Its V is held while keys are passed,
  // so there have to be fewer elements between the tiles than stages.
  __device__ __forceinline__ Walk cross(const Tile& tile, const Order& following) {
    const uint64_t v = Base::describe_value();
    Base::wait_value();
    ptx::fence_products();
    Base::multiply_probability_value(v);
    Base::pass_keys(following.skip);
    const uint64_t q = Base::describe_query(), k = Base::describe_key();
    Base::wait_query();
    Base::wait_key();
    ptx::fence_products();
    Base::multiply_query_key(q, k);
    const Walk steps = Base::plan_walk(following.tile);
    ptx::wait_products<1>();
    Base::release_value();
    Base::store(tile);
    ptx::wait_products<0>();
    Base::release_key();
    Base::first_softmax(following.tile);
    Base::pass_values(following.skip);
    return steps;
  }

  // A tile and those that follow it. Returns the order that ended the chain.
  __device__ __forceinline__ Order chain(Tile tile)
    requires(C::kEarly)
  {
    Walk steps = Base::begin(tile);
    while (true) {
      Base::walk(tile, steps);
      Base::release_query(true);
      query.next();
      const Order following = fetch();
      if (following.tile.kind != Kind::kTile || following.skip >= C::kStages) {
        Base::finish(tile, steps);
        return following;
      }
      steps = cross(tile, following);
      tile = following.tile;
    }
  }
  // With one buffer of Q, the output is stored before the elements up to the next tile are waited for: they are there for that.
  __device__ __forceinline__ Order chain(Tile tile)
    requires(!C::kEarly)
  {
    while (true) {
      const Walk steps = Base::begin(tile);
      Base::walk(tile, steps);
      query.next();
      const Order following = fetch();
      Base::finish(tile, steps);
      if (following.tile.kind != Kind::kTile) return following;
      pass(following.skip);
      tile = following.tile;
    }
  }

  __device__ __forceinline__ void run() {
    Base::clear();
    Order order = fetch();
    while (true) {
      ptx::fence_products();  // see ForwardWorker::fetch()
      const Kind kind = static_cast<Kind>(ptx::uniform(static_cast<int>(order.tile.kind)));
      if (kind == Kind::kEnd) break;
      pass(ptx::uniform(order.skip));
      if (kind == Kind::kTile) {
        order = chain(order.tile);
      } else {
        Base::release_work(order.tile);
        if (kind == Kind::kDrain) ptx::arrive(barriers.drained());
        order = fetch();
      }
    }
    if (lane == 0) ptx::wait_stores<0>();
  }
};

}  // namespace flash::sm90
