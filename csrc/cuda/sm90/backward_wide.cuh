// sm90/backward_wide.cuh: head dims up to 256, where one warpgroup cannot hold dK and dV of 64 keys. One makes S, P and dV, the other
// dP, dS and dK; P crosses through shared memory. Both are stored through the buffers of Q and dO of the last block, so that K and V of
// the next tile travel as soon as those of this one are read for the last time.
#pragma once
#include "cuda/sm90/backward_worker.cuh"

namespace flash::sm90 {

// kValues: the warpgroup of dV.
template <class C, bool kValues>
struct WideGradients : BackwardWorker<C> {
  using Worker = BackwardWorker<C>;
  using T = typename C::T;
  using Worker::barriers, Worker::base, Worker::gradient, Worker::key, Worker::lane, Worker::p, Worker::query, Worker::release,
      Worker::warp;
  static constexpr int kParts = C::kDim / 128;

  BackwardSlot tile;
  // [64 keys, dim]: dV or dK. ptxas takes no product with 128 accumulators where a thread starts with 128 registers.
  float sum[kParts][64];
  float score[C::kRows / 2];           // [64 keys, rows]: S, or dP and dS
  uint32_t operand[C::kRows / 16][4];  // P, or dS, as A operands
  uint32_t tile_parity = 0, weight_parity = 0;

  const uint32_t score_to;

  __device__ __forceinline__ WideGradients(const BackwardArguments& p, uint32_t base)
      : Worker(p, base), score_to(kValues ? 0 : this->score_place(0)) {}

  // S or dP of the current stages.
  __device__ __forceinline__ void multiply_first() {
    // `zero` keeps ptxas from holding the descriptors of all steps, more than there are uniform registers.
    const uint32_t zero = ptx::uniform(ptx::opaque_zero());
    const uint64_t a = ptx::describe_matrix(base + (kValues ? C::kKeyAt : C::kValueAt) + zero, 16, 1024);
    if constexpr (kValues) {
      this->template multiply<Worker::kLse>(score, a, this->describe_query());
    } else {
      this->template multiply<Worker::kDelta>(score, a, this->describe_gradient());
    }
  }

  // sum += operand times the columns of the stages before the current ones, as one batch.
  __device__ __forceinline__ void accumulate_before() {
    const uint64_t b = kValues ? this->describe_gradient_columns(this->place(gradient.stage_before()))
                               : this->describe_query_columns(this->place(query.stage_before()));
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        ptx::multiply_async<T, 1>(sum[part], operand[i], b + i * (16 * 128 / 16) + part * (2 * C::kRowPanel / 16));
    ptx::commit_products();
  }

  // score = P, and what dS needs of it to the other warpgroup.
  __device__ __forceinline__ void weigh(int m, const Steps& full) {
    uint32_t slope[Worker::kSlopes];
    this->exponentiate(score, slope, tile, 0, m, full);
    ptx::wait(barriers.weight_empty(), weight_parity ^ 1);
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[e] = C::kCapped  ? slope[4 * i + e]
                   : C::kRests ? dense_halves(score[8 * i + 2 * e], score[8 * i + 2 * e + 1])
                               : ptx::pack(score[8 * i + 2 * e], score[8 * i + 2 * e + 1], T());
      ptx::store_shared(weights_at(i), make_uint4(words[0], words[1], words[2], words[3]));
    }
    ptx::arrive(barriers.weight_full());
    weight_parity ^= 1;
  }
  __device__ __forceinline__ uint32_t weights_at(int i) const {
    return base + C::kWeightAt + i * 2048 + (threadIdx.x & 127) * 16;
  }

  // P of the next block, from the other warpgroup.
  __device__ __forceinline__ void take_weights(uint4 (&weights)[C::kRows / 16]) {
    ptx::wait(barriers.weight_full(), weight_parity);
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) weights[i] = ptx::load_shared_16(weights_at(i));
    ptx::arrive(barriers.weight_empty());
    weight_parity ^= 1;
  }

  // score = dS.
  __device__ __forceinline__ void differentiate(const uint4 (&weights)[C::kRows / 16]) {
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) {
      const uint32_t words[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (C::kRests) {
          multiply_by_dense_halves(score + 8 * i + 2 * e, words[e], p.unit);
        } else {
          multiply_by<T>(score + 8 * i + 2 * e, words[e]);
        }
      }
    }
  }

  // operand = P or dS of block m, whose S or dP is in `score` or under way, with dV or dK of the block before behind it.
  // final: the last block of the tile.
  template <bool kFirst>
  __device__ __forceinline__ void advance(int m, bool final, const Steps& full) {
    uint4 weights[C::kRows / 16];
    if constexpr (!kValues) take_weights(weights);
    ptx::wait_products<kFirst ? 0 : 1>();
    if (final) release_tile();
    if constexpr (kValues) {
      if (!C::kCapped) release(barriers.query_empty(query.stage));
      weigh(m, full);
      if (C::kCapped) release(barriers.query_empty(query.stage));
    } else {
      release(barriers.gradient_empty(gradient.stage));
      // Before the arithmetic: the wait ends a basic block, so that ptxas loads all of P at once.
      if constexpr (C::kSums) {
        ptx::wait(barriers.score_empty(this->score_slot.stage), this->score_slot.parity ^ 1);
      } else {
        ptx::wait(barriers.query_full(query.stage), query.parity);  // complete already
      }
      differentiate(weights);
    }
    uint32_t packed[C::kRows / 16][4];
    if constexpr (!kValues) {
      this->template pack<false>(score, packed);
      if constexpr (C::kSums) {
        this->store_scores(packed, score_to, this->score_slot);
        this->score_slot.next();
      } else {
        ptx::wait(barriers.query_full(query.stage), query.parity);  // complete already: ends a basic block, as the store does
      }
    }
    if constexpr (!kFirst) {
      if constexpr (kValues) {
        ptx::pin(score);
        // Complete already, and not released before: the wait ends a basic block, so that ptxas keeps what is above before the wait
        // for the sum.
        ptx::wait(barriers.gradient_full(gradient.stage_before()), gradient.parity_before());
      }
      ptx::wait_products<0>();
      release_before();
    }
    if constexpr (kValues) {
      this->template pack<C::kRests>(score, operand);
    } else {
      this->copy(packed, operand);
    }
  }
  // This warpgroup reads K or V no more.
  __device__ __forceinline__ void release_tile() { release(kValues ? barriers.key_empty(0) : barriers.value_empty(0)); }
  // What the sum has read.
  __device__ __forceinline__ void release_before() {
    release(kValues ? barriers.gradient_empty(gradient.stage_before()) : barriers.query_empty(query.stage_before()));
  }

  // dV or dK of block m, whose P or dS is in `operand`; leaves that of the next block there.
  // final: the next block is the last of the tile.
  __device__ __forceinline__ void step(int m, bool final, const Steps& full) {
    if (kValues) ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    query.next();
    gradient.next();
    ptx::wait(barriers.query_full(query.stage), query.parity);
    if (!kValues) ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    ptx::fence_products();
    multiply_first();
    accumulate_before();
    advance<false>(m + 1, final, full);
  }

  // The same of the last block of a query head. In a loop with the others it would cost them their uniform registers.
  // heads: of the group that are left, this one included.
  __device__ __forceinline__ void finish(int heads) {
    if (kValues) ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    query.next();
    gradient.next();
    ptx::fence_products();
    accumulate_before();
    ptx::wait_products<0>();
    if (heads == 1) store();
    release_before();
  }

  // The sum of this warp's keys, through the buffer of dO (or Q) of the last block, which is this warpgroup's alone by now: the other
  // has taken (or sent) P of that block after its product with it.
  __device__ __forceinline__ void store() {
    static_assert(C::kRowPanel == C::kKeyPanel);
    if (!(kValues ? p.write_dvalue : p.write_dkey)) return;
    if (kValues) ptx::wait(barriers.weight_empty(), weight_parity ^ 1);
    ptx::sync_named(kValues ? 1 : 2, 128);
    const uint32_t buffer = kValues ? C::kGradientAt + this->place(gradient.stage_before()) * C::kRowBytes
                                    : C::kQueryAt + this->place(query.stage_before()) * C::kRowBytes;
    const uint32_t staging = base + buffer + warp * 16 * 128;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      this->stage(sum[part], kValues ? 1.f : p.scale, staging + part * 2 * C::kKeyPanel, 0);
    this->store_boxes(kValues ? &p.dvalue : &p.dkey, staging, C::kKeyPanel, tile, warp * 16);
    if (lane == 0) ptx::wait_stores_read<0>();
  }

  // The blocks of rows of one query head.
  __device__ __forceinline__ void walk(int m, int last, int heads, const Steps& full) {
    ptx::wait(barriers.query_full(query.stage), query.parity);
    if (!kValues) ptx::wait(barriers.gradient_full(gradient.stage), gradient.parity);
    ptx::fence_products();
    multiply_first();
    advance<true>(m, m == last && heads == 1, full);
#pragma unroll 1
    for (; m < last; ++m) step(m, m + 1 == last && heads == 1, full);
    finish(heads);
  }

  __device__ __forceinline__ void run() {
    while (this->fetch(tile)) {
#pragma unroll
      for (int i = 0; i < C::kDim / 2; ++i) sum[i / 64][i % 64] = 0;
      const uint4 place = ptx::load_shared_16(tile.place()), sequence = ptx::load_shared_16(tile.sequence());
      const int begin = static_cast<int>(place.x);
      const int first = this->bound(static_cast<int>(place.z)), last = this->bound(static_cast<int>(place.w));
      const Steps full =
          this->bound(unmasked<C::kRows>(p, static_cast<int>(sequence.x), static_cast<int>(sequence.y), begin, begin + 64));
      ptx::wait(kValues ? barriers.key_full(0) : barriers.value_full(0), tile_parity);
      tile_parity ^= 1;
      if (first > last) {  // no row sees these keys
        release_tile();
        if (kValues ? p.write_dvalue : p.write_dkey)
          this->store_boxes(kValues ? &p.dvalue : &p.dkey, base + C::kZeroAt, 0, tile, warp * 16);
      } else {
#pragma unroll 1
        for (int heads = p.group; heads > 0; --heads) walk(first, last, heads, full);
      }
      this->release_work(tile);
    }
    if (lane == 0) ptx::wait_stores<0>();
  }
};

}  // namespace flash::sm90
