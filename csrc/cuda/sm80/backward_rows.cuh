// sm80/backward_rows.cuh: dQ from the side of the rows, 16-bit elements. A block owns kRows query rows of one head and walks over the
// keys they see: S = Q K^T, dP = dO V^T, dS = P (dP - delta), dQ += dS K, all in registers, written once.
// Recomputes S and dP (7 products in all, with dK and dV from backward.cuh, instead of 5), but needs no sums in global memory:
// no scratch, and the same bits in every run.
#pragma once
#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/backward_block.cuh"
#include "cuda/sm80/backward_score.cuh"
#include "cuda/tile/multiply.cuh"
#include "cuda/tile/store.cuh"
#include "cuda/tiles.h"

namespace flash::sm80 {

template <class T_, cuda::RowGradientTile kTile>
struct RowsConfig {
  using T = T_;
  static constexpr bool kPlain = kTile.plain;
  static constexpr int kHeadDim = kTile.bucket, kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kResident = kTile.resident, kWarpRows = kRows / kTile.warps;

  using Operand = tile::Swizzled<kHeadDim>;  // Q, dO [kRows, kHeadDim]; K, V [kKeys, kHeadDim]
  using RowLoader = tile::Loader<Operand, kRows, kThreads>;
  using KeyLoader = tile::Loader<Operand, kKeys, kThreads>;

  // Shared memory: Q, dO, K[2], V[2].
  static constexpr int kRowBytes = Operand::bytes(kRows), kKeyBytes = Operand::bytes(kKeys);
  static constexpr int kGradientAt = kRowBytes, kKeyAt = 2 * kRowBytes, kValueAt = kKeyAt + 2 * kKeyBytes;
  static constexpr int kSharedBytes = kValueAt + 2 * kKeyBytes;
  static_assert(kSharedBytes == cuda::row_gradient_shared_bytes(kTile));
};

template <class Config>
class RowGradients {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  static constexpr bool kPlain = Config::kPlain;
  static constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kI = Config::kWarpRows / 16,
                       kSteps = Config::kHeadDim / 16;
  using Scores = float[kI][kKeys / 8][4];

 public:
  static __device__ __forceinline__ void run(const BackwardCall& call) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Owner owner = Owner::find<true, kRows>(call);
    if (owner.count <= 0) return;
    RowGradients(call, owner, ptx::shared_address(memory)).walk();
  }

 private:
  __device__ __forceinline__ RowGradients(const BackwardCall& call, const Owner& owner, uint32_t shared)
      : call_(call),
        owner_(owner),
        walk_(Walk::over_keys<kKeys>(owner)),
        shared_(shared),
        lane_(threadIdx.x & 31),
        row_line_(static_cast<int>(threadIdx.x >> 5) * Config::kWarpRows),
        dropout_(!kPlain && call.problem.dropout_p > 0 ? problem::dropout(call.problem.seed, call.problem.dropout_p)
                                                       : problem::Dropout{}),
        sLines_(Operand::address(shared, row_line_ + tile::row_block_row(lane_), tile::row_block_chunk(lane_))),
        sColumns_(Operand::address(shared + Config::kKeyAt, tile::column_block_row(lane_), tile::column_block_chunk(lane_))),
        sTransposed_(Operand::address(shared + Config::kKeyAt, tile::row_block_row(lane_), tile::row_block_chunk(lane_))),
        key_(call.problem.key.row, owner.sequence.keys, call.problem.head_dim, call.load_bytes),
        value_(call.problem.value.row, owner.sequence.keys, call.problem.value_dim, call.load_bytes) {}

  __device__ __forceinline__ void walk() {
    load_rows();
    load_statistics();
    tile::clear(rQueryGradient_);
    const problem::Problem& p = call_.problem;
    const int64_t kv_head = call_.by_group.divide(owner_.head);
    key_.begin(p.key.data, problem::offset(p.key, owner_.batch, kv_head, owner_.sequence.key), walk_.first);
    value_.begin(p.value.data, problem::offset(p.value, owner_.batch, kv_head, owner_.sequence.key), walk_.first);
    key_.clear(shared_ + Config::kKeyAt, 2);
    value_.clear(shared_ + Config::kValueAt, 2);
    fetch(walk_.first, 0);
    int stage = 0;
#pragma unroll 1
    for (int key_tile = walk_.first; key_tile <= walk_.last; ++key_tile) {
      ptx::wait_copies<0>();
      __syncthreads();
      fetch(key_tile + 1, stage ^ 1);
      step(key_tile, stage * Config::kKeyBytes);
      stage ^= 1;
    }
    ptx::wait_copies<0>();
    __syncthreads();  // also where no key is seen: rows that other threads copied must have landed before dQ goes over them
    store();
  }

  // Q and dO of the block, once.
  __device__ __forceinline__ void load_rows() const {
    const problem::Problem& p = call_.problem;
    const int64_t line = owner_.sequence.row + owner_.first;
    load_own<typename Config::RowLoader, Operand, kPlain>(call_, owner_, p.query, line, p.head_dim, shared_);
    load_own<typename Config::RowLoader, Operand, kPlain>(call_, owner_, call_.gradients.dout, line, p.value_dim,
                                                          shared_ + Config::kGradientAt);
  }

  __device__ __forceinline__ void load_statistics() {
    const common::Scratch& scratch = call_.scratch;
    const int64_t first = scratch.first_block(owner_.sequence, owner_.head) * common::kBlockRows + owner_.first;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = row_line_ + i * 16 + half * 8 + tile::lane_line(lane_);
        const bool exists = line < owner_.count;
        rLse2_[i][half] = exists ? scratch.lse2[first + line] : INFINITY;
        rDelta_[i][half] = exists ? scratch.delta[first + line] : 0.f;
      }
  }

  __device__ __forceinline__ void fetch(int key_tile, int stage) {
    using Loader = typename Config::KeyLoader;
    if (key_tile <= walk_.last) {
      const uint32_t to = shared_ + Config::kKeyAt + stage * Config::kKeyBytes;
      const uint32_t to_lane = Operand::address(to, Loader::row(), Loader::chunk());
      constexpr uint32_t kApart = Config::kValueAt - Config::kKeyAt;
      key_.fetch(key_tile, to, to_lane);
      value_.fetch(key_tile, to + kApart, to_lane + kApart);
    }
    ptx::commit_copies();
  }

  // One tile of keys, at `offset` bytes in the buffers of K and V.
  __device__ __forceinline__ void step(int key_tile, uint32_t offset) {
    constexpr uint32_t kApart = Config::kValueAt - Config::kKeyAt;
    Scores rScore, rGradient;
    tile::clear(rScore);
    tile::clear(rGradient);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t rQuery[kI][4], rOut[kI][4], rKey[4], rValue[4];
      tile::load_rows<Operand>(rQuery, Operand::columns(sLines_, k));
      tile::load_rows<Operand>(rOut, Operand::columns(sLines_, k) + Config::kGradientAt);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        const uint32_t sColumns = Operand::columns(sColumns_, k) + offset + j * 16 * Operand::kRowBytes;
        ptx::load_matrices(rKey, sColumns);
        ptx::load_matrices(rValue, sColumns + kApart);
        tile::multiply<T>(rScore, j, rQuery, rKey);
        tile::multiply<T>(rGradient, j, rOut, rValue);
      }
    }

    const common::Place at(owner_.first, int64_t{key_tile} * kKeys, row_line_, 0, lane_);
    const bool border = !walk_.full(key_tile);
    const auto statistics = [&](int i, int, int half) {
      return Statistics{{rLse2_[i][half], rLse2_[i][half]}, {rDelta_[i][half], rDelta_[i][half]}};
    };
    if constexpr (kPlain) {
      if (border) common::hide<false>(rScore, owner_.interval, owner_.sequence.rows, at);
      weigh_plain(rScore, rGradient, call_.modifiers.scale * common::kLog2e, statistics);
    } else {
      const ScoreContext context{call_, owner_.sequence, owner_.interval, dropout_, owner_.batch, owner_.head, border, lane_};
      weigh_general<false, T>(rScore, rGradient, context, at, statistics);
    }
    uint32_t rScoreGradient[kI][kKeys / 16][4];
    tile::pack<T>(rScoreGradient, rScore);

#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint32_t rKey[4];
        ptx::load_matrices_transposed(rKey, Operand::columns(sTransposed_, j) + offset + k * 16 * Operand::kRowBytes);
        tile::multiply<T>(rQueryGradient_, j, rScoreGradient, k, rKey);
      }
  }

  // dQ through this warp's own rows of the buffer of Q.
  __device__ __forceinline__ void store() const {
    const float scale = call_.modifiers.scale;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kSteps * 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int line = row_line_ + i * 16 + half * 8 + tile::lane_line(lane_);
          const float (&r)[4] = rQueryGradient_[i][j];
          tile::store_pair<T, Operand>(shared_, line, j, lane_, r[2 * half] * scale, r[2 * half + 1] * scale);
        }
    __syncwarp();
    const problem::Array& dq = call_.gradients.dquery;
    char* to = static_cast<char*>(dq.data) +
               problem::offset(dq, owner_.batch, owner_.head, owner_.sequence.row + owner_.first + row_line_) * 2;
    tile::store_rows<Operand, Config::kWarpRows, 32>(to, dq.row * 2, shared_, row_line_, owner_.count - row_line_,
                                                     static_cast<int>(call_.problem.head_dim) * 2, call_.store_bytes, lane_);
  }

  const BackwardCall& call_;
  const Owner owner_;
  const Walk walk_;
  const uint32_t shared_;
  const int lane_, row_line_;  // row_line_: this warp's first row in the tile
  const problem::Dropout dropout_;
  // Lane addresses for ldmatrix: Q (or dO) as lines; K (or V) as columns; K transposed.
  const uint32_t sLines_, sColumns_, sTransposed_;
  LineStream<typename Config::KeyLoader, Operand, kKeys, kPlain> key_, value_;
  float rLse2_[kI][2], rDelta_[kI][2];
  float rQueryGradient_[kI][kSteps * 2][4];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    backward_rows_kernel(const __grid_constant__ BackwardCall call) {
  RowGradients<Config>::run(call);
}

}  // namespace flash::sm80
