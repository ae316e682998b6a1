// sm80/backward.cuh: gradients from the side of the keys, 16-bit elements, on mma.sync and cp.async.
// A block owns kKeys keys of one kv head. It walks over the tiles of kRows queries that see them, for each query head of the group:
//   S^T = K Q^T, dP^T = V dO^T             keys are lines, so P^T and dS^T come out as A operands
//   P = 2^(S - lse2), dS = P (dP - delta)  lse is known: no maximum, no rescaling
//   dV += P^T dO, dK += dS^T Q             in registers for the whole walk
//   dQ += dS K                             added to fp32 sums in global memory (skipped where backward_rows.cuh computes dQ)
// Warps: kKeyWarps along the keys, 32 keys each, times kSharing along the queries of a tile. With kSharing = 1 P^T and dS^T stay in
// registers and only dS^T crosses through shared memory, for dQ. Else both do, and dK, dV are divided by columns; with kSharing = 4
// S^T and dP^T are divided as well (backward_products.cuh).
#pragma once
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/backward_block.cuh"
#include "cuda/sm80/backward_config.cuh"
#include "cuda/sm80/backward_feed.cuh"
#include "cuda/sm80/backward_products.cuh"
#include "cuda/sm80/backward_score.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/store.cuh"

namespace flash::sm80 {

template <class Config>
class KeyGradients {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  using Weights = typename Config::Weights;
  static constexpr bool kPlain = Config::kPlain;
  static constexpr int kHeadDim = Config::kHeadDim, kKeys = Config::kKeys, kRows = Config::kRows, kChunk = Config::kChunk;
  static constexpr int kSharing = Config::kSharing, kStages = Config::kStages, kI = Config::kWarpKeys / 16;
  static constexpr int kSteps = kHeadDim / 16;                 // k steps of S^T and dP^T
  static constexpr int kColumnBlocks = Config::kColumns / 16;  // of dK and dV; a warp's blocks lie kSharing apart
  using Scores = float[kI][kChunk / 8][4];
  using Packed = uint32_t[kI][kChunk / 16][4];
  using Products = ScoreProducts<Config>;

 public:
  static __device__ __forceinline__ void run(const BackwardCall& call) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Owner owner = Owner::find<false, kKeys>(call);
    if (owner.count <= 0) return;
    const uint32_t shared = ptx::shared_address(memory);
    load_keys(call, owner, shared);
    const Walk walk = Walk::over_rows<kRows, kKeys>(owner);
    if constexpr (kPlain) {
      KeyGradients(call, owner, walk, shared).walk();
    } else {
      // The modifiers need the registers: the loop reads the owner again from shared memory.
      Owner& kept = *reinterpret_cast<Owner*>(memory + Config::kOwnerAt);
      static_assert(sizeof(Owner) <= cuda::kSharedBlockBytes);
      if (threadIdx.x == 0) kept = owner;
      __syncthreads();
      KeyGradients(call, kept, walk, shared).walk();
    }
  }

 private:
  __device__ __forceinline__ KeyGradients(const BackwardCall& call, const Owner& owner, const Walk& walk, uint32_t shared)
      : call_(call),
        owner_(owner),
        walk_(walk),
        shared_(shared),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5),
        key_line_(warp_ % Config::kKeyWarps * Config::kWarpKeys),
        query_warp_(kSharing == 1 ? 0 : warp_ / Config::kKeyWarps),
        dropout_(!kPlain && call.problem.dropout_p > 0 ? problem::dropout(call.problem.seed, call.problem.dropout_p)
                                                       : problem::Dropout{}),
        sLines_(Operand::address(shared, key_line_ + tile::row_block_row(lane_), tile::row_block_chunk(lane_))),
        sColumns_(Operand::address(shared + Config::kQueryAt, tile::column_block_row(lane_) + query_warp_ * kChunk,
                                   tile::column_block_chunk(lane_))),
        sTransposed_(Operand::address(shared + Config::kQueryAt, tile::row_block_row(lane_),
                                      tile::row_block_chunk(lane_) + query_warp_ * 2)),
        sStore_(Weights::address(shared + Config::kScoreAt, key_line_ + tile::lane_line(lane_), query_warp_ * (kChunk / 8)) +
                tile::lane_column(lane_) * 2),
        feed_(call, owner, shared) {}

  __device__ __forceinline__ void walk() {
    tile::clear(rKeyGradient_);
    tile::clear(rValueGradient_);
    const int steps = walk_.count() * static_cast<int>(call_.group);
    if (steps > 0) {
      feed_.begin(owner_, walk_);
      begin_sums(0);
    }
    if constexpr (kStages > 1) feed_.fetch(owner_, walk_, 0, steps > 0);
    int stage = 0, row_tile = walk_.first, head = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if constexpr (kStages > 1) {
        ptx::wait_copies<0>();
        __syncthreads();
        feed_.fetch(owner_, walk_, stage ^ 1, step + 1 < steps);
      } else {
        __syncthreads();  // everybody is done with the previous tile
        feed_.fetch(owner_, walk_, 0, true);
        ptx::wait_copies<0>();
        __syncthreads();
      }
      this->step(stage, row_tile, head);
      if constexpr (kStages > 1) stage ^= 1;
      gSum_ += sum_step_;
      if (++row_tile > walk_.last) {
        row_tile = walk_.first;
        ++head;
        if (head < call_.group) begin_sums(head);
      }
    }
    ptx::commit_copies();  // keys that nobody sees: nothing was committed, and a wait covers committed copies only
    ptx::wait_copies<0>();
    __syncthreads();
    store();
  }

  __device__ __forceinline__ int64_t query_head(int head) const { return owner_.head * call_.group + head; }

  // K and V of the block, once.
  static __device__ __forceinline__ void load_keys(const BackwardCall& call, const Owner& owner, uint32_t shared) {
    const problem::Problem& p = call.problem;
    const int64_t line = owner.sequence.key + owner.first;
    load_own<typename Config::KeyLoader, Operand, kPlain>(call, owner, p.key, line, p.head_dim, shared);
    load_own<typename Config::KeyLoader, Operand, kPlain>(call, owner, p.value, line, p.value_dim, shared + Config::kValueAt);
  }

  // The walk over the sums of dQ of the same rows starts.
  __device__ __forceinline__ void begin_sums(int head) {
    const common::Scratch& scratch = call_.scratch;
    if (scratch.dquery == nullptr) return;
    const int64_t block = scratch.first_block(owner_.sequence, query_head(head)) + walk_.first * (kRows / common::kBlockRows) +
                          warp_ % Config::kDqRowWarps * (Config::kDqRows / common::kBlockRows);
    gSum_ = scratch.dquery_block(block) + (warp_ / Config::kDqRowWarps) * 2 * common::kBlockElements;
    sum_step_ = static_cast<int>(scratch.columns) * (kRows / common::kBlockRows * common::kBlockElements);
  }

  __device__ __forceinline__ uint32_t statistics(int stage) const {
    return shared_ + Config::kStatisticsAt + stage * Config::kStatisticsBytes;
  }

  // One tile of queries.
  __device__ __forceinline__ void step(int stage, int row_tile, int head) {
    const uint32_t stage_offset = stage * Config::kRowBytes;
#pragma unroll(kPlain ? Config::kChunks : 1)
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      const int first = chunk * kChunk * kSharing;  // of the chunk's queries, before those of this warp
      Scores rScore, rGradient;
      multiply_scores(rScore, rGradient, stage_offset + first * Operand::kRowBytes);
      Packed rWeight, rScoreGradient;
      weigh(rScore, rGradient, rWeight, rScoreGradient, stage, row_tile, head, first);
      if constexpr (kSharing == 1) accumulate(rWeight, rScoreGradient, stage_offset + first * Operand::kRowBytes);
    }
    if (call_.scratch.dquery != nullptr) {
      __syncthreads();
      if constexpr (kSharing > 1)
        accumulate_shared(stage_offset);  // written twice: together with dQ it is scheduled as one block
      add_query_gradient(row_tile);
    } else if constexpr (kSharing > 1) {
      __syncthreads();
      accumulate_shared(stage_offset);
    }
  }

  // rScore = K Q^T, rGradient = V dO^T for this warp's keys and a chunk of queries.
  __device__ __forceinline__ void multiply_scores(Scores& rScore, Scores& rGradient, uint32_t offset) const {
    constexpr uint32_t kApart = kStages * Config::kRowBytes;  // from Q to dO
    tile::clear(rScore);
    tile::clear(rGradient);
    if constexpr (kSharing == 1) {
      // Both products in one loop: twice as many independent accumulators; registers allow it here.
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t rKey[kI][4], rValue[kI][4], rQuery[kChunk / 16][4], rOut[kChunk / 16][4];
        tile::load_rows<Operand>(rKey, Operand::columns(sLines_, k));
        tile::load_rows<Operand>(rQuery, Operand::columns(sColumns_, k) + offset);
        tile::load_rows<Operand>(rValue, Operand::columns(sLines_, k) + Config::kValueAt);
        tile::load_rows<Operand>(rOut, Operand::columns(sColumns_, k) + offset + kApart);
#pragma unroll
        for (int j = 0; j < kChunk / 16; ++j) {
          tile::multiply<T>(rScore, j, rKey, rQuery[j]);
          tile::multiply<T>(rGradient, j, rValue, rOut[j]);
        }
      }
    } else if constexpr (Products::kPaired) {
      Products::paired(rScore, rGradient, {shared_, key_line_, query_warp_, lane_}, sLines_, sColumns_ + offset);
    } else {
      tile::multiply_lines<T, Operand, kSteps>(rScore, sLines_, sColumns_ + offset);
      tile::multiply_lines<T, Operand, kSteps>(rGradient, sLines_ + Config::kValueAt, sColumns_ + offset + kApart);
    }
  }

  // P^T and dS^T of a chunk, rounded, and where other warps need them into shared memory.
  __device__ __forceinline__ void weigh(Scores& rScore, Scores& rGradient, Packed& rWeight, Packed& rScoreGradient, int stage,
                                        int row_tile, int head, int first) const {
    const common::Place at(int64_t{row_tile} * kRows, owner_.first, key_line_, first + query_warp_ * kChunk, lane_);
    const bool border = !walk_.full(row_tile);
    const uint32_t sStatistics = statistics(stage) + at.column * 4;
    const auto statistic = [&](int, int j, int) {  // lse2 and delta of the lane's two queries
      const float2 lse2 = ptx::load_shared_8(sStatistics + j * 32),
                   delta = ptx::load_shared_8(sStatistics + (kRows + j * 8) * 4);
      return Statistics{{lse2.x, lse2.y}, {delta.x, delta.y}};
    };
    if constexpr (kPlain) {
      if (border) common::hide<true>(rScore, owner_.interval, owner_.sequence.rows, at);
      weigh_plain(rScore, rGradient, call_.modifiers.scale * common::kLog2e, statistic);
    } else {
      const ScoreContext context{call_,        owner_.sequence,  owner_.interval, dropout_,
                                 owner_.batch, query_head(head), border,          lane_};
      weigh_general<true, T>(rScore, rGradient, context, at, statistic);
    }
    tile::pack<T>(rWeight, rGradient);
    tile::pack<T>(rScoreGradient, rScore);
    // dS^T is needed for dQ at least. In plain instances a test would cost more than the stores that it saves.
    const bool crosses = kPlain || kSharing > 1 || call_.scratch.dquery != nullptr;
#pragma unroll
    for (int j = 0; j < kChunk / 8; ++j) {
      const uint32_t sPair = Weights::chunks(sStore_, first / 8 + j);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t to = sPair + (i * 16 + half * 8) * Weights::kRowBytes;
          if (crosses) ptx::store_shared(to, rScoreGradient[i][j / 2][(j & 1) * 2 + half]);
          if constexpr (kSharing > 1) ptx::store_shared(to + Config::kWeightBytes, rWeight[i][j / 2][(j & 1) * 2 + half]);
        }
    }
  }

  // dV += P^T dO, dK += dS^T Q with operands in registers; all columns are this warp's.
  __device__ __forceinline__ void accumulate(const Packed& rWeight, const Packed& rScoreGradient, uint32_t offset) {
    const auto add = [&](float (&rSum)[kI][Config::kColumns / 8][4], const Packed& rLines, uint32_t sColumns) {
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          uint32_t rColumn[4];
          ptx::load_matrices_transposed(rColumn, Operand::columns(sColumns, j) + k * 16 * Operand::kRowBytes);
          tile::multiply<T>(rSum, j, rLines, k, rColumn);
        }
    };
    add(rValueGradient_, rWeight, sTransposed_ + offset + kStages * Config::kRowBytes);
    add(rKeyGradient_, rScoreGradient, sTransposed_ + offset);
  }

  // The same with P^T and dS^T of the whole tile from shared memory, for this warp's columns.
  __device__ __forceinline__ void accumulate_shared(uint32_t offset) {
    const uint32_t sScore =
        Weights::address(shared_ + Config::kScoreAt, key_line_ + tile::row_block_row(lane_), tile::row_block_chunk(lane_));
    const uint32_t sQuery = sTransposed_ + offset, sGradient = sQuery + kStages * Config::kRowBytes;
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      uint32_t rWeight[kI][4], rScore[kI][4], rColumn[4];
      tile::load_rows<Weights>(rWeight, Weights::columns(sScore, k) + Config::kWeightBytes);
      tile::load_rows<Weights>(rScore, Weights::columns(sScore, k));
      const uint32_t row = k * 16 * Operand::kRowBytes;
      // One loop where registers allow it, for more independent accumulators.
      constexpr bool kTogether = kHeadDim <= 128;
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        ptx::load_matrices_transposed(rColumn, Operand::columns(sGradient, j * kSharing) + row);
        if constexpr (kTogether) {
          uint32_t rQuery[4];
          ptx::load_matrices_transposed(rQuery, Operand::columns(sQuery, j * kSharing) + row);
          tile::multiply<T>(rKeyGradient_, j, rScore, rQuery);
        }
        tile::multiply<T>(rValueGradient_, j, rWeight, rColumn);
      }
      if constexpr (!kTogether) {
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          ptx::load_matrices_transposed(rColumn, Operand::columns(sQuery, j * kSharing) + row);
          tile::multiply<T>(rKeyGradient_, j, rScore, rColumn);
        }
      }
    }
  }

  // dQ [kRows, kHeadDim] = dS K of this tile, this warp's part, added to the sums in global memory.
  __device__ __forceinline__ void add_query_gradient(int row_tile) const {
    constexpr int kBlocks = Config::kDqColumns / 16,
                  kPass = kBlocks > 4 ? 4 : kBlocks;  // column blocks; at a time, for registers
    static_assert(kBlocks % kPass == 0);
    const common::Scratch& scratch = call_.scratch;
    const int first_row = row_tile * kRows + warp_ % Config::kDqRowWarps * Config::kDqRows;
    // The common case without a test per group of columns.
    const bool whole = first_row + Config::kDqRows <= owner_.sequence.rows && scratch.columns == kHeadDim / 8;
#pragma unroll
    for (int first = 0; first < kBlocks; first += kPass) {
      float rSum[Config::kDqRows / 16][kPass * 2][4];
      multiply_query_gradient<kPass>(rSum, first);
      const auto add = [&](int64_t columns, int rows) {
#pragma unroll
        for (int i = 0; i < Config::kDqRows / 16; ++i)
#pragma unroll
          for (int j = 0; j < kPass * 2; ++j) {
            const int column = (first + j / 2) * Config::kDqColumnWarps * 2 + j % 2;  // from this warp's first
            // The next block of rows may be another sequence's.
            if (whole || (i * 16 < rows && (warp_ / Config::kDqRowWarps) * 2 + column < columns))
              common::add_private(gSum_ + (i * columns + column) * common::kBlockElements, lane_, rSum[i][j]);
          }
      };
      if (whole) {
        add(kHeadDim / 8, Config::kDqRows);
      } else {
        add(scratch.columns, static_cast<int>(owner_.sequence.rows) - first_row);
      }
    }
  }

  // Column blocks first, ... of the warp's; they lie kDqColumnWarps apart.
  template <int kPass>
  __device__ __forceinline__ void multiply_query_gradient(float (&rSum)[Config::kDqRows / 16][kPass * 2][4], int first) const {
    constexpr int kRowBlocks = Config::kDqRows / 16;
    const int row_warp = warp_ % Config::kDqRowWarps, column_warp = warp_ / Config::kDqRowWarps;
    const uint32_t sScore = Weights::address(shared_ + Config::kScoreAt, tile::column_block_row(lane_),
                                             tile::column_block_chunk(lane_) + row_warp * (Config::kDqRows / 8));
    const uint32_t sKey = Operand::address(shared_, tile::row_block_row(lane_), tile::row_block_chunk(lane_) + column_warp * 2);
    tile::clear(rSum);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t rLines[kRowBlocks][4], rColumns[kPass][4];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i)
        ptx::load_matrices_transposed(rLines[i], Weights::columns(sScore, i) + k * 16 * Weights::kRowBytes);
#pragma unroll
      for (int j = 0; j < kPass; ++j)
        ptx::load_matrices_transposed(
            rColumns[j], Operand::columns(sKey, (first + j) * Config::kDqColumnWarps) + k * 16 * Operand::kRowBytes);
#pragma unroll
      for (int j = 0; j < kPass; ++j) tile::multiply<T>(rSum, j, rLines, rColumns[j]);
    }
  }

  // dK and dV through the buffers of K and V.
  __device__ __forceinline__ void store() const {
    const float scale = call_.modifiers.scale;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < Config::kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int line = key_line_ + i * 16 + half * 8 + tile::lane_line(lane_);
          const int chunk = (query_warp_ + j / 2 * kSharing) * 2 + j % 2;
          const float (&k)[4] = rKeyGradient_[i][j];
          const float (&v)[4] = rValueGradient_[i][j];
          tile::store_pair<T, Operand>(shared_, line, chunk, lane_, k[2 * half] * scale, k[2 * half + 1] * scale);
          tile::store_pair<T, Operand>(shared_ + Config::kValueAt, line, chunk, lane_, v[2 * half], v[2 * half + 1]);
        }
    __syncthreads();
    const auto write = [&](const problem::Array& a, uint32_t from, int64_t dim) {
      if (a.data == nullptr) return;
      char* to =
          static_cast<char*>(a.data) + problem::offset(a, owner_.batch, owner_.head, owner_.sequence.key + owner_.first) * 2;
      tile::store_rows<Operand, kKeys, Config::kThreads>(to, a.row * 2, from, 0, owner_.count, static_cast<int>(dim) * 2,
                                                         call_.store_bytes, threadIdx.x);
    };
    write(call_.gradients.dkey, shared_, call_.problem.head_dim);
    write(call_.gradients.dvalue, shared_ + Config::kValueAt, call_.problem.value_dim);
  }

  const BackwardCall& call_;
  const std::conditional_t<kPlain, Owner, const Owner&> owner_;
  const Walk walk_;
  const uint32_t shared_;
  const int lane_, warp_;
  const int key_line_, query_warp_;  // this warp's first key in the tile; its place among the warps that share keys
  const problem::Dropout dropout_;
  // Lane addresses for ldmatrix: K (or V, kValueAt further) as lines; Q (or dO) as columns; Q (or dO) transposed.
  const uint32_t sLines_, sColumns_, sTransposed_;
  const uint32_t sStore_;  // where this lane's pair of dS^T goes
  RowFeed<Config> feed_;
  float* gSum_ = nullptr;  // sums of dQ of the tile that is computed, this warp's first
  int sum_step_ = 0;       // from tile to tile
  float rKeyGradient_[kI][Config::kColumns / 8][4], rValueGradient_[kI][Config::kColumns / 8][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    backward_keys_kernel(const __grid_constant__ BackwardCall call) {
  KeyGradients<Config>::run(call);
}

}  // namespace flash::sm80
