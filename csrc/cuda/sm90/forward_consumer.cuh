// sm90/forward_consumer.cuh: a consumer warpgroup: 64 rows of every tile, their scores, probabilities and output in registers.
// S = Q K^T and O += P V are asynchronous; while one warpgroup does exponentials, the others keep the tensor cores busy.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_config.cuh"
#include "cuda/sm90/forward_output.cuh"
#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

template <class C>
struct Consumer {
  using T = typename C::T;

  const ForwardArguments& p;
  const uint32_t base;
  const Barriers<C> barriers;
  const int group;                          // warpgroup
  const int warp = (threadIdx.x >> 5) & 3;  // in the warpgroup
  const int lane = threadIdx.x & 31;
  Ring<C::kQueries> query;
  Ring<C::kStages> key, value;
  Ring<C::kSlots> slot;
  float score[C::kKeys / 2];               // [64, keys]: S, then P
  uint32_t probability[C::kKeys / 16][4];  // P as A operands
  float output[C::kDim / 2];               // [64, dim]
  Rows state;

  __device__ __forceinline__ Consumer(const ForwardArguments& p, uint32_t base, Barriers<C> barriers, int group)
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

  // score = Q K^T, as one batch.
  __device__ __forceinline__ void multiply_query_key(uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {  // 16 columns are 32 bytes of a panel's row; descriptors count 16 bytes
      const uint64_t a = q + (i / 4) * (C::kQueryPanel / 16) + (i % 4) * 2, b = k + (i / 4) * (C::kKeyPanel / 16) + (i % 4) * 2;
      if (i == 0) {
        ptx::multiply_async<T, 0>(score, a, b);
      } else {
        ptx::multiply_async<T, 1>(score, a, b);
      }
    }
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
    ptx::wait(barriers.key_full(key.stage), key.parity);
    begin_turn();
    ptx::fence_products();
    multiply_query_key(q, k);
    ptx::wait(barriers.value_full(value.stage), value.parity);
    ptx::fence_products();
    multiply_probability_value(v);
    end_turn();
  }
  __device__ __forceinline__ void wait_score() {  // P V may still be under way
    ptx::wait_products<1>();
    release_key();
  }

  __device__ __forceinline__ void release_key() {
    release(barriers.key_empty(key.stage));
    key.next();
  }
  // With one buffer of Q after the last S of a tile; with more there is time until the end of the tile.
  __device__ __forceinline__ void release_query(bool last) {
    if (last && lane == 0) ptx::arrive(barriers.query_empty(query.stage, part()));
  }
  __device__ __forceinline__ void release_value() {
    release(barriers.value_empty(value.stage));
    value.next();
  }

  // Blocks that this warpgroup does not use; the turn of each goes by, so that warpgroups take as many.
  __device__ __forceinline__ void pass_keys(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      ptx::wait(barriers.key_full(key.stage), key.parity);
      begin_turn(), end_turn();
      release_key();
    }
  }
  __device__ __forceinline__ void pass_values(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      ptx::wait(barriers.value_full(value.stage), value.parity);
      release_value();
    }
  }

  // Ping-pong: the issue of products goes round the warpgroups.
  __device__ __forceinline__ void begin_turn() {
    if (C::kTurns) ptx::sync_named(1 + group, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if (C::kTurns) ptx::arrive_named(1 + (group + 1) % C::kGroups, 256);
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
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y),
              diagonal = p.bottom_right ? keys - rows : 0;
    mask(score, row + group * 64 + warp * 16 + lane / 4 + diagonal, block * C::kKeys + (lane & 3) * 2, p.left, p.right, keys,
         hidden);
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
    p.edges ? first_softmax<true>(tile) : first_softmax<false>(tile);
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
      if (C::kHalves) ptx::wait(barriers.value_full(value.stage), value.parity);
      ptx::wait_products<0>();
      release_value();
      exponentials<T, kFirst, kPairs, 0>(score, probability, p.scale_log2, subtrahend, sum);
    }
    add(sum);
  }

  // The blocks of a tile behind the first, newest first: `block` down to exact_end, on to quick_end, on to end, and those of which other
  // warpgroups see something, down to first. Uniform, since uniform bounds make uniform loops, in which the stages of the rings stay in
  // uniform registers and with them all descriptors.
  struct Walk {
    int block, exact_end, quick_end, end, first;
    __device__ __forceinline__ int behind() const { return end - first; }
  };
  // Blocks of which all rows see all keys, below one of which every row has seen a key, take the quick step. Below them, at the left
  // edge of a window, masked ones: no row sees its first key there, so the reference may stay.
  __device__ __forceinline__ Walk plan_walk(const Tile& tile) {
    const uint4 place = ptx::load_shared_16(tile.slot.place()), sequence = ptx::load_shared_16(tile.slot.sequence());
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y), first = static_cast<int>(place.z);
    const int top = static_cast<int>(place.x) + group * 64 + (p.bottom_right ? keys - rows : 0);  // first row, on the key axis
    const int full_end = max(min(top + p.right, keys - 1), 0) / C::kKeys;  // that row has seen key full_end * kKeys
    const int full_begin = (max(top + 63 - p.left, 0) + C::kKeys - 1) / C::kKeys;
    const bool safe = ptx::load_shared_volatile(tile.slot.safe()) != 0;
    const int last = static_cast<int>(place.w) - tile.ahead, end = min(max(max(top - p.left, 0) / C::kKeys, first), last);
    return {ptx::uniform(last - 1), ptx::uniform(safe ? end : max(full_end, end)), ptx::uniform(max(full_begin, end)),
            ptx::uniform(end), ptx::uniform(first)};
  }

  __device__ __forceinline__ void walk(const Tile& tile, Walk walk) {
#pragma unroll 1
    for (; walk.block >= walk.exact_end; --walk.block) step<true, true>(tile, walk.block, walk.end);
#pragma unroll 1
    for (; walk.block >= walk.quick_end; --walk.block) step<false, false>(tile, walk.block, walk.end);
#pragma unroll 1
    for (; walk.block >= walk.end; --walk.block) step<true, false>(tile, walk.block, walk.end);
    pass_keys(walk.behind());
  }

  // O / l and lse of a finished tile.
  __device__ __forceinline__ void store(const Tile& tile) {
    const Finished finished{ptx::load_shared_16(tile.slot.place()), ptx::load_shared_16(tile.slot.sequence()),
                            ptx::load_shared_16(tile.slot.fate())};
    const auto settle = [&](bool overflowed) {
      if (overflowed && lane == 0) ptx::store_shared(tile.slot.overflowed(), 1u);
      release_work(tile);
    };
    const uint32_t staging = base + C::kOutputAt + (group * 4 + warp) * C::kOutputs * C::kOutputPanel;
    store_rows<C>(p, finished, group * 64 + warp * 16, lane, settle, staging, state, output);
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
    ptx::wait(barriers.query_full(query.stage, part()), query.parity);
    ptx::wait(barriers.key_full(key.stage), key.parity);
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
    ptx::wait(barriers.value_full(value.stage), value.parity);
    ptx::fence_products();
    multiply_probability_value(v);
    ptx::wait_products<0>();
    release_value();
    pass_values(steps.behind());
    store(tile);
  }

  // A tile and those that follow it. With two buffers of Q there is no break between them: the first S of the next is issued before the
  // last P V of this one. With one, Q of the next is loaded while the last P V runs and the output is stored.
  // Returns what ended the chain.
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
        pass_keys(following.ahead);
        const int unused = steps.behind() + following.ahead;
        const uint64_t q = describe_query(), k = describe_key(), v = describe_value();
        ptx::wait(barriers.value_full(value.stage), value.parity);
        begin_turn();
        ptx::fence_products();
        multiply_probability_value(v);
        ptx::wait(barriers.query_full(query.stage, part()), query.parity);
        ptx::wait(barriers.key_full(key.stage), key.parity);
        ptx::fence_products();
        multiply_query_key(q, k);
        end_turn();
        steps = plan_walk(following);
        ptx::wait_products<1>();
        release_value();
        store(tile);
        ptx::wait_products<0>();
        release_key();
        first_softmax(following);
        pass_values(unused);
      } else {
        finish(tile, steps);
        steps = begin(following);
      }
      tile = following;
    }
    finish(tile, steps);
    return following;
  }

  // A tile in which this warpgroup has no rows. Returns by how much the rings of K and V have to move on: moved in here, they would be
  // kept in vector registers everywhere.
  __device__ __forceinline__ int pass(const Tile& tile) {
    const uint4 place = ptx::load_shared_16(tile.slot.place());
    ptx::wait(barriers.query_full(query.stage, part()), query.parity);
    release(barriers.query_empty(query.stage, part()));
    Ring<C::kStages> k = key, v = value;
#pragma unroll 1
    for (uint32_t block = place.z; block <= place.w; ++block, k.next(), v.next()) {
      ptx::wait(barriers.key_full(k.stage), k.parity);
      begin_turn(), end_turn();
      release(barriers.key_empty(k.stage));
      ptx::wait(barriers.value_full(v.stage), v.parity);
      release(barriers.value_empty(v.stage));
    }
    release_work(tile);
    return place.w - place.z + 1;
  }

  __device__ __forceinline__ void run() {
    clear();
    if (C::kTurns && group == C::kGroups - 1) ptx::arrive_named(1, 256);  // the first turn is free
    while (true) {
      Tile tile = fetch();
      if (tile.kind == Kind::kTile) tile = chain(tile);
      ptx::fence_products();  // see fetch()
      const Kind kind = static_cast<Kind>(ptx::uniform(static_cast<int>(tile.kind)));
      if (kind == Kind::kEnd) break;
      int blocks = 0;
      if (kind == Kind::kPass) {
        blocks = pass(tile);
      } else {
        release_work(tile);
        ptx::arrive(barriers.drained());
      }
      ptx::fence_products();
      blocks = ptx::uniform(blocks);
      key.advance(blocks), value.advance(blocks), query.advance(min(blocks, 1));
    }
    if (C::kTurns && group == 0) ptx::sync_named(1, 256);  // takes the last turn, so that no arrival is left over
    if (lane == 0) ptx::wait_stores<0>();
  }
};

}  // namespace flash::sm90
