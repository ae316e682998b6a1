// sm90/backward_keys.cuh: a warpgroup with 64 keys of every tile: their S^T, P^T, dP^T, dS^T in registers by turns, dK and dV for the
// whole walk over the rows. P^T and dS^T are A operands as they come; dS^T also goes to shared memory for dQ. The two warpgroups of a
// block never wait for each other.
//
// One block of rows m, and what the tensor cores have to do meanwhile:
//   issue  dP(m) | dV += P(m)  dO    wait dP, dS = P (dP - delta), pack, store   under dV;    wait dV
//   issue  S(m+1) | dK += dS(m) Q    wait S,  P = 2^S                            under dK;    wait dK, pack P
// After the last block dV is stored beside the last product, and P of the next tile is made before dK is stored.
#pragma once
#include "cuda/sm90/backward_worker.cuh"

namespace flash::sm90 {

template <class C>
struct KeyGradients : BackwardWorker<C> {
  using Worker = BackwardWorker<C>;
  using T = typename C::T;
  using Worker::barriers, Worker::base, Worker::gradient, Worker::key, Worker::lane, Worker::p, Worker::query, Worker::release,
      Worker::warp;

  const int group;
  BackwardSlot tile;
  Steps own, full;                                     // blocks of rows that see a key of this warpgroup; those that see all
  int m, last;                                         // current block; last of the tile
  float key_sum[C::kDim / 2], value_sum[C::kDim / 2];  // [64 keys, dim]: dK, dV
  float score[C::kRows / 2];                           // [64 keys, rows]: S, P, dP, dS in turn
  uint32_t operand[C::kRows / 16][4];                  // P, then dS, as A operands
  uint32_t rest[C::kRows / 8];                         // of P, see kept()
  uint32_t slope[Worker::kSlopes];                     // of the cap, times P
  Ring<C::kValueStages> value;
  const uint32_t score_to;  // see score_place()

  __device__ __forceinline__ KeyGradients(const BackwardArguments& p, uint32_t base, int group)
      : Worker(p, base), group(group), score_to(this->score_place(group * 64)) {}

  // Whether the rests of four elements of P are kept. Those of the fourth quarter would take registers: 1 % (dim 128) to 3 % (64) slower,
  // while dQ and dK are 6 % more exact.
  static constexpr bool kept(int four) { return four % 4 != 3; }

  // sum += operand b, as one batch. b: rows along K.
  __device__ __forceinline__ void accumulate(float (&sum)[C::kDim / 2], uint64_t b) {
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) ptx::multiply_async<T, 1>(sum, operand[i], b + i * (16 * 128 / 16));
    ptx::commit_products();
  }

  __device__ __forceinline__ void multiply_key_query() {
    const uint64_t a = ptx::describe_matrix(base + C::kKeyAt + key.place() * C::kKeyBytes + group * 64 * 128, 16, 1024);
    this->template multiply<Worker::kLse>(score, a, this->describe_query());
  }
  __device__ __forceinline__ void multiply_value_gradient() {
    const uint64_t a = ptx::describe_matrix(base + C::kValueAt + value_offset() + group * 64 * 128, 16, 1024);
    this->template multiply<Worker::kDelta>(score, a, this->describe_gradient());
  }

  __device__ __forceinline__ int first_key() const { return ptx::load_shared_volatile(tile.place()) + group * 64; }

  // operand = P of the current block, whose S is in `score` or under way, with dK of the block before behind it.
  template <bool kFirst>
  __device__ __forceinline__ void weigh() {
    ptx::wait_products<kFirst ? 0 : 1>();
    this->exponentiate(score, slope, tile, group * 64, m, full);
    if constexpr (C::kRests) {
#pragma unroll
      for (int j = 0; j < C::kRows / 8; ++j)
        if (kept(j)) rest[j] = rests(score + 4 * j);
    }
    if (!kFirst) {
      // Complete already, and not released before: the wait ends a basic block, so that ptxas keeps the exponentials before the wait for dK.
      ptx::wait(barriers.query_full(query.stage), query.parity);
      ptx::wait_products<0>();
      release(barriers.query_empty(query.stage_before()));
    }
    this->template pack<C::kRests>(score, operand);
  }

  // dV and dK of the current block, whose P is in `operand`; leaves P of the next block that this warpgroup sees, if any, there.
  // heads: of the group that are left, this one included; dV is complete with the last block of the last.
  __device__ __forceinline__ void step(int heads) {
    ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    ptx::fence_products();
    multiply_value_gradient();
    accumulate(value_sum, this->describe_gradient_columns(gradient.place()));
    const bool final = m++ == own.last;
    const uint32_t before = query.place();
    query.next();
    ptx::wait_products<1>();
    if constexpr (C::kRests) {
#pragma unroll
      for (int j = 0; j < C::kRows / 8; ++j) {
        const uint32_t* halves = operand[j / 2] + j % 2 * 2;
        if (kept(j)) {
          multiply_by(score + 4 * j, halves, rest[j]);
        } else {
          multiply_by_middle(score + 4 * j, halves);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kRows / 4; ++i) multiply_by<T>(score + 2 * i, C::kCapped ? slope[i] : operand[i / 4][i % 4]);
    }
    // dS leaves before dV is waited for: the store holds ptxas back from doing the arithmetic after the wait, and dQ starts early.
    uint32_t packed[C::kRows / 16][4];
    this->template pack<false>(score, packed);
    if constexpr (C::kSums) {
      this->store_scores(packed, score_to, gradient);
    } else {
      ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);  // as in weigh()
    }
    if (!final) ptx::wait(barriers.query_full(query.stage), query.parity);
    ptx::wait_products<0>();
    release(barriers.gradient_empty(gradient.stage));
    this->copy(packed, operand);
    gradient.next();
    if (final) {
      ptx::fence_products();
      accumulate(key_sum, this->describe_query_columns(before));
      if (heads == 1) store_value();
      ptx::wait_products<0>();
      release(barriers.query_empty(query.stage_before()));
    } else {
      ptx::fence_products();
      multiply_key_query();
      accumulate(key_sum, this->describe_query_columns(before));
      weigh<false>();
    }
  }

  // A block of rows that sees none of this warpgroup's keys.
  __device__ __forceinline__ void skip() {
    ptx::wait(barriers.query_full(query.stage), query.parity);
    release(barriers.query_empty(query.stage));
    query.next();
    ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    release(barriers.gradient_empty(gradient.stage));
    if constexpr (C::kSums) {
      ptx::wait(barriers.score_empty(gradient.stage), gradient.parity ^ 1);
      release(barriers.score_full(gradient.stage));
    }
    gradient.next();
  }

  // Starts on the blocks of rows of a query head: those that do not see this warpgroup's keys, then S and P of the first that does.
  __device__ __forceinline__ void begin() {
    const uint4 place = ptx::load_shared_16(tile.place());
    m = this->bound(static_cast<int>(place.z));
    last = this->bound(static_cast<int>(place.w));
#pragma unroll 1
    for (const int end = own.first <= own.last ? own.first : last + 1; m < end; ++m) skip();
    if (m > last) return;
    ptx::wait(barriers.query_full(query.stage), query.parity);
    ptx::fence_products();
    multiply_key_query();
    weigh<true>();
  }

  // The rest of them.
  __device__ __forceinline__ void walk(int heads) {
#pragma unroll 1
    while (m <= own.last) step(heads);
#pragma unroll 1
    for (; m <= last; ++m) skip();
  }

  // dV of this warp's keys, through their place in the buffer of V: this warpgroup alone reads it, and no more.
  __device__ __forceinline__ void store_value() {
    if (!p.write_dvalue) return;
    ptx::sync_named(1 + group, 128);
    const uint32_t staging = base + C::kValueAt + value_offset() + first_of_warp() * 128;
    this->stage(value_sum, 1.f, staging, m >> 31);
    this->store_boxes(&p.dvalue, staging, C::kKeyPanel, tile, first_of_warp());
  }

  // V may be loaded again once dV has left its place.
  __device__ __forceinline__ void release_value() {
    if (lane == 0) {
      ptx::wait_stores_read<0>();
      ptx::arrive(barriers.value_empty(value.stage));
    }
    value.next();
  }

  // dK of this warp's keys of a finished tile, through their place in its stage of K, once dQ has read that too: when the last dS is
  // read, which filled `scores`.
  __device__ __forceinline__ void store_key(BackwardSlot finished, int stage, const Ring<C::kScores>& scores) {
    if (p.write_dkey) {
      if constexpr (C::kSums) ptx::wait(barriers.score_empty(scores.stage_before()), scores.parity_before());
      ptx::sync_named(1 + group, 128);
      const uint32_t staging = base + C::kKeyAt + stage * C::kKeyBytes + first_of_warp() * 128;
      this->stage(key_sum, p.scale, staging, m >> 31);
      this->store_boxes(&p.dkey, staging, C::kKeyPanel, finished, first_of_warp());
    }
    if (lane == 0) {
      ptx::wait_stores_read<0>();
      ptx::arrive(barriers.key_empty(stage));
    }
  }

  __device__ __forceinline__ uint32_t value_offset() const {
    return C::kValueStages > 1 ? this->place(value.stage) * C::kKeyBytes : 0;
  }
  __device__ __forceinline__ int first_of_warp() const { return group * 64 + warp * 16; }

  __device__ __forceinline__ int skipped_from() const { return ptx::load_shared_volatile(tile.place() + 8); }

  // Reads the current tile and waits for its K.
  __device__ __forceinline__ void open() {
    const uint4 sequence = ptx::load_shared_16(tile.sequence());
    const int rows = static_cast<int>(sequence.x), keys = static_cast<int>(sequence.y), begin = first_key();
    own = this->bound(viewers<C::kRows>(p, rows, keys, begin, begin + 64));
    full = this->bound(unmasked<C::kRows>(p, rows, keys, begin, begin + 64));
    ptx::wait(barriers.key_full(key.stage), key.parity);
  }

  __device__ __forceinline__ void run() {
    bool more = this->fetch(tile);
    if (more) {
      open();
      begin();
    }
#pragma unroll 1
    while (more) {
#pragma unroll
      for (int i = 0; i < C::kDim / 2; ++i) key_sum[i] = value_sum[i] = 0;
      ptx::wait(barriers.value_full(value.stage), value.parity);
#pragma unroll 1
      for (int heads = p.group;; --heads) {
        walk(heads);
        if (heads == 1) break;
        begin();
      }
      if (own.first > own.last) store_value();
      release_value();
      const BackwardSlot finished = tile;
      const int stage = key.stage;
      const Ring<C::kScores> scores = gradient;
      key.next();
      more = this->fetch(tile);
      if (more) open();
      // The producer loads two blocks of a tile, but maybe no third, before it needs the K that this tile still holds.
      const bool early = this->bound(more && own.first <= own.last && own.first - skipped_from() <= 1);
      if (early) begin();
      store_key(finished, stage, scores);
      this->release_work(finished);
      if (more && !early) begin();
    }
    if (lane == 0) ptx::wait_stores<0>();
  }
};

}  // namespace flash::sm90
