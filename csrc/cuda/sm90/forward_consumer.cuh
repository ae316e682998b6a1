// sm90/forward_consumer.cuh: a consumer warpgroup: 64 rows of every tile, their scores, probabilities and output in registers.
// S = Q K^T and O += P V are asynchronous; while one warpgroup does exponentials, the others keep the tensor cores busy.
#pragma once
#include "cuda/sm90/forward_output.cuh"
#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_worker.cuh"
#include "cuda/sm90/key_walk.cuh"
#include "cuda/sm90/panels.cuh"

namespace flash::sm90 {

template <class C>
struct Consumer : ForwardWorker<C> {
  using Worker = ForwardWorker<C>;
  using typename Worker::Tile;
  using T = typename C::T;
  using Worker::base, Worker::barriers, Worker::group, Worker::key, Worker::lane, Worker::p, Worker::query, Worker::warp;
  using Worker::begin_turn, Worker::end_turn, Worker::fetch, Worker::pass_keys, Worker::pass_values, Worker::release_key,
      Worker::release_query, Worker::release_value, Worker::release_work, Worker::wait_key, Worker::wait_query,
      Worker::wait_value;
  using Worker::describe_key, Worker::describe_query, Worker::describe_value;

  float score[C::kKeys / 2];               // [64, keys]: S, then P
  uint32_t probability[C::kKeys / 16][4];  // P as A operands
  float output[C::kDim / 2];               // [64, dim]
  Rows state;

  using Worker::Worker;

  // score = Q K^T, as one batch.
  __device__ __forceinline__ void multiply_query_key(uint64_t q, uint64_t k) {
    multiply_panels<T, C::kDim, C::kQueryPanel, C::kKeyPanel>(score, q, k);
    ptx::commit_products();
  }

  // output += P V, as one batch.
  __device__ __forceinline__ void multiply_probability_value(uint64_t v) {
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) ptx::multiply_async<T, 1>(output, probability[i], v + i * (16 * 128 / 16));
    ptx::commit_products();
  }

  // Issues score = Q K^T of the current key stage and output += P V of the current value stage, once both are there.
  __device__ __forceinline__ void issue_both(int offset) {
    const uint64_t q = describe_query(offset), k = describe_key(), v = describe_value();
    wait_key();
    begin_turn();
    ptx::fence_products();
    multiply_query_key(q, k);
    wait_value();
    ptx::fence_products();
    multiply_probability_value(v);
    end_turn();
  }
  __device__ __forceinline__ void wait_score() {  // P V may still be under way
    ptx::wait_products<1>();
    release_key();
  }

  // Scores as the softmax takes them: capped, and -inf where a row does not see the key.
  template <bool kMask>
  __device__ __forceinline__ void modify(const Tile& tile, int block) {
    if constexpr (C::kCapped) {
      if constexpr (kMask) mask_block(tile, block, 0);
      cap(score, p.cap_scale);
    }
    if constexpr (kMask) mask_block(tile, block, -INFINITY);
  }
  __device__ __forceinline__ void mask_block(const Tile& tile, int block, float hidden) {
    const int row = ptx::load_shared_volatile(tile.slot.row());
    const uint4 sequence = ptx::load_shared_16(tile.slot.sequence());
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y);
    const int diagonal = p.bottom_right ? keys - rows : 0;
    mask(score, row + C::rows_before(group) + warp * 16 + lane / 4 + diagonal, block * C::kKeys + (lane & 3) * 2, p.left,
         p.right, keys, hidden);
  }

  __device__ __forceinline__ void add(const float (&sum)[2][2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float share = sum[r][0] + sum[r][1];
      state.sum[r] += share;
      if constexpr (std::is_same_v<T, __half>) state.peak[r] = fmaxf(state.peak[r], share);
    }
  }

  // Probabilities of the first block of a tile: its row maxima become the reference of the whole tile.
  __device__ __forceinline__ void first_softmax(const Tile& tile) {
    // The whole stage twice: ptxas serialises products around a branch within it (C7514).
    C::kStream || p.edges ? first_softmax<true>(tile) : first_softmax<false>(tile);
  }
  template <bool kMask>
  __device__ __forceinline__ void first_softmax(const Tile& tile) {
    modify<kMask>(tile, kMask ? static_cast<int>(ptx::load_shared_volatile(tile.slot.last())) - tile.ahead : 0);
    float maximum[2], subtrahend[2], sum[2][2] = {};
    row_max<kMask>(score, maximum);
    state.start(maximum);
    state.reference(p.scale_log2, subtrahend);
    const float scale_log2 = reduce_large(score, p.scale_log2, subtrahend);
    constexpr int kPairs = C::kKeys / 4;
    exponentials<T, 0, kPairs, 0>(score, probability, scale_log2, subtrahend, sum);
    add(sum);
  }

  // score = Q K[block]^T beside output += P V[block + 1], then P = softmax(score).
  // kFollow: the row maximum is followed. Else the reference of the blocks before is kept; store() checks that it held.
  template <bool kMask, bool kFollow>
  __device__ __forceinline__ void step(const Tile& tile, int block, int end) {
    constexpr int kPairs = C::kKeys / 4;
    float subtrahend[2], sum[2][2] = {};
    // 0, but ptxas cannot know: else it computes all descriptors of a wide Q before the loop, more than there are uniform registers.
    issue_both(C::kDim > 128 ? block >> 31 : 0);
    wait_score();
    if (!C::kEarly) release_query(block == end);
    modify<kMask>(tile, block);
    if constexpr (kFollow) {
      float maximum[2], factor[2];
      row_max<kMask>(score, maximum);
      ptx::wait_products<0>();
      release_value();
      if (state.follow(maximum, p.scale_log2, factor)) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) output[i] *= factor[(i >> 1) & 1];
      }
      state.reference(p.scale_log2, subtrahend);
      const float scale_log2 = reduce_large(score, p.scale_log2, subtrahend);
      exponentials<T, 0, kPairs, 0>(score, probability, scale_log2, subtrahend, sum);
    } else {
      state.reference<kMask>(p.scale_log2, subtrahend);
      constexpr int kFirst = C::kHalves ? kPairs / 2 : 0;
      exponentials<T, 0, kFirst, kFirst>(score, probability, p.scale_log2, subtrahend, sum);
      // Complete already: the wait ends a basic block, so that ptxas keeps these exponentials before the wait for P V.
      if (C::kHalves) wait_value();
      ptx::wait_products<0>();
      release_value();
      exponentials<T, kFirst, kPairs, 0>(score, probability, p.scale_log2, subtrahend, sum);
    }
    add(sum);
  }

  // The blocks of a tile behind the first, and down to `first` those of which other warpgroups see something.
  struct Walk : KeyWalk {
    int first;
    __device__ __forceinline__ int behind() const { return this->end - first; }
  };
  // Blocks of which all rows see all keys, below one of which every row has seen a key, take the quick step. Below them, at the left
  // edge of a window, masked ones: no row sees its first key there, so the reference may stay.
  __device__ __forceinline__ Walk plan_walk(const Tile& tile) {
    const uint4 place = ptx::load_shared_16(tile.slot.place()), sequence = ptx::load_shared_16(tile.slot.sequence());
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y), first = static_cast<int>(place.z);
    const int diagonal = p.bottom_right ? keys - rows : 0;
    const int top = static_cast<int>(place.x) + C::rows_before(group) + diagonal;  // first row, on the key axis
    const int exact_end = max(min(top + p.right, keys - 1), 0) / C::kKeys;         // that row has seen key exact_end * kKeys
    const int unmasked_end = oldest_unmasked<C::kKeys>(p, top);
    const bool safe = ptx::load_shared_volatile(tile.slot.safe()) != 0;
    const int last = static_cast<int>(place.w) - tile.ahead;
    const int end = min(max(oldest_seen<C::kKeys>(p, top), first), last);
    const KeyWalk seen{ptx::uniform(last - 1), ptx::uniform(safe ? end : max(exact_end, end)),
                       ptx::uniform(max(unmasked_end, end)), ptx::uniform(end)};
    return {seen, ptx::uniform(first)};
  }

  __device__ __forceinline__ void walk(const Tile& tile, Walk walk) {
    walk.run([&](int block) { step<true, true>(tile, block, walk.end); },
             [&](int block) { step<false, false>(tile, block, walk.end); },
             [&](int block) { step<true, false>(tile, block, walk.end); });
    pass_keys(walk.behind());
  }

  // O / l and lse of a finished tile.
  __device__ __forceinline__ void store(const Tile& tile) {
    const Finished finished{ptx::load_shared_16(tile.slot.place()), ptx::load_shared_16(tile.slot.sequence()),
                            ptx::load_shared_16(tile.slot.fate())};
    const auto settle = [&](bool overflowed) {
      if (overflowed && lane == 0) C::note_overflow(base, tile.slot);
      release_work(tile);
    };
    const uint32_t staging = base + C::kOutputAt + (group * 4 + warp) * C::kOutputs * C::kOutputPanel;
    store_rows<C>(p, finished, C::rows_before(group) + warp * 16, lane, settle, staging, state, output);
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) output[i] = 0;
  }

  // score = Q K^T of the first block of a tile, then P, with nothing else under way.
  __device__ __forceinline__ Walk begin(const Tile& tile) {
    pass_keys(tile.ahead);
    const uint64_t q = describe_query(), k = describe_key();
    wait_query();
    wait_key();
    begin_turn();
    ptx::fence_products();
    multiply_query_key(q, k);
    end_turn();
    const Walk steps = plan_walk(tile);
    ptx::wait_products<0>();
    release_key();
    if (!C::kEarly) release_query(steps.block < steps.end);
    first_softmax(tile);
    pass_values(tile.ahead);
    return steps;
  }

  // The last P V of a tile, and its output.
  __device__ __forceinline__ void finish(const Tile& tile, const Walk& steps) {
    const uint64_t v = describe_value();
    wait_value();
    ptx::fence_products();
    multiply_probability_value(v);
    ptx::wait_products<0>();
    release_value();
    pass_values(steps.behind());
    store(tile);
  }

  // The last P V of a tile beside the first S of the next, with two buffers of Q.
  __device__ __forceinline__ Walk cross(const Tile& tile, const Walk& steps, const Tile& following) {
    pass_keys(following.ahead);
    const int unused = steps.behind() + following.ahead;
    const uint64_t q = describe_query(), k = describe_key(), v = describe_value();
    wait_value();
    begin_turn();
    ptx::fence_products();
    multiply_probability_value(v);
    wait_query();
    wait_key();
    ptx::fence_products();
    multiply_query_key(q, k);
    end_turn();
    const Walk next = plan_walk(following);
    ptx::wait_products<1>();
    release_value();
    store(tile);
    ptx::wait_products<0>();
    release_key();
    first_softmax(following);
    pass_values(unused);
    return next;
  }

  // A tile and those that follow it. With two buffers of Q there is no break between them. With one, Q of the next is loaded while the
  // last P V runs and the output is stored. Returns what ended the chain.
  __device__ __forceinline__ Tile chain(Tile tile) {
    Walk steps = begin(tile);
    Tile following;
    while (true) {
      walk(tile, steps);
      if (C::kEarly) release_query(true);
      query.next();
      following = fetch();
      if (following.kind != Kind::kTile) break;
      if constexpr (C::kEarly) {
        steps = cross(tile, steps, following);
      } else {
        finish(tile, steps);
        steps = begin(following);
      }
      tile = following;
    }
    finish(tile, steps);
    return following;
  }

  __device__ __forceinline__ void run() {
    clear();
    this->free_first_turn();
    while (true) {
      Tile tile = fetch();
      if (tile.kind == Kind::kTile) tile = chain(tile);
      ptx::fence_products();  // see fetch()
      const Kind kind = static_cast<Kind>(ptx::uniform(static_cast<int>(tile.kind)));
      if (kind == Kind::kEnd) break;
      int blocks = 0;
      if (kind == Kind::kPass) {
        blocks = this->pass_tile(tile);
      } else {
        release_work(tile);
        ptx::arrive(barriers.drained());
      }
      ptx::fence_products();
      this->advance(ptx::uniform(blocks));
    }
    this->take_last_turn();
    if (lane == 0) ptx::wait_stores<0>();
  }
};

}  // namespace flash::sm90
