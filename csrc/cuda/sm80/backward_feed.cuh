// sm80/backward_feed.cuh: what a block that owns keys walks over, read ahead into shared memory: tiles of Q and dO with their lse2 and
// delta, for each query head of the group. Pointers walk along; nothing is addressed anew from tile to tile.
#pragma once
#include "cuda/sm80/backward_block.cuh"
#include "cuda/sm80/backward_config.cuh"

namespace flash::sm80 {

template <class Config>
class RowFeed {
  using Operand = typename Config::Operand;
  using Loader = typename Config::RowLoader;
  static constexpr int kRows = Config::kRows;
  static constexpr uint32_t kApart = Config::kStages * Config::kRowBytes;  // from Q to dO

 public:
  // shared: the block's memory. The caller's owner and walk are handed in again and again: with references to its neighbours among the
  // members, the whole object would be kept in memory.
  __device__ __forceinline__ RowFeed(const BackwardCall& call, const Owner& owner, uint32_t shared)
      : call_(call),
        shared_(shared),
        query_(call.problem.query.row, owner.sequence.rows, call.problem.head_dim, call.load_bytes),
        gradient_(call.gradients.dout.row, owner.sequence.rows, call.problem.value_dim, call.load_bytes) {}

  // Before the first fetch(), if there is a tile.
  __device__ __forceinline__ void begin(const Owner& owner, const Walk& walk) {
    query_.clear(shared_ + Config::kQueryAt, Config::kStages);
    gradient_.clear(shared_ + Config::kGradientAt, Config::kStages);
    begin_head(owner, walk);
  }

  // Issues the copies of the next tile, one group.
  __device__ __forceinline__ void fetch(const Owner& owner, const Walk& walk, int stage, bool exists) {
    if (exists) {
      const uint32_t to = shared_ + Config::kQueryAt + stage * Config::kRowBytes;
      const uint32_t to_lane = Operand::address(to, Loader::row(), Loader::chunk());
      query_.fetch(tile_, to, to_lane);
      gradient_.fetch(tile_, to + kApart, to_lane + kApart);
      if (threadIdx.x < kRows / 2) {
        const bool inside = rows_left_ > 0;
        const uint32_t to_statistics = shared_ + Config::kStatisticsAt + stage * Config::kStatisticsBytes;
        ptx::copy_16(to_statistics + threadIdx.x * 16, inside ? statistic_ : call_.scratch.lse2, inside ? 16 : 0);
      }
      statistic_ += kRows;
      rows_left_ -= kRows;
      if (++tile_ > walk.last) {
        ++head_;
        if (head_ < call_.group) begin_head(owner, walk);
      }
    }
    ptx::commit_copies();
  }

 private:
  // The walk over the rows of a query head starts.
  __device__ __forceinline__ void begin_head(const Owner& owner, const Walk& walk) {
    tile_ = walk.first;
    const problem::Problem& p = call_.problem;
    const problem::Array& dout = call_.gradients.dout;
    const int64_t head = owner.head * call_.group + head_;
    query_.begin(p.query.data, problem::offset(p.query, owner.batch, head, owner.sequence.row), tile_);
    gradient_.begin(dout.data, problem::offset(dout, owner.batch, head, owner.sequence.row), tile_);
    const int part = threadIdx.x / (kRows / 4), row = threadIdx.x % (kRows / 4) * 4 + tile_ * kRows;
    statistic_ = (part == 0 ? call_.scratch.lse2 : call_.scratch.delta) +
                 call_.scratch.first_block(owner.sequence, head) * common::kBlockRows + row;
    rows_left_ = static_cast<int>(owner.sequence.rows) - row;
  }

  const BackwardCall& call_;
  const uint32_t shared_;
  LineStream<Loader, Operand, kRows, Config::kPlain> query_, gradient_;
  int tile_, head_ = 0;     // what fetch() takes next
  const float* statistic_;  // what this thread copies of its lse2 and delta
  int rows_left_;           // in the sequence, from there
};

}  // namespace flash::sm80
