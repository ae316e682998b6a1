// sm80/forward_block.cuh: what a forward kernel is called with, and which rows and keys one block of it owns.
// Blocks are numbered by common/sections.h; the longest rows (the last ones under a causal mask) come first.
#pragma once
#include "cuda/common/locate.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/sections.h"
#include "cuda/tile/load.cuh"
#include "cuda/tiles.h"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/problem.h"

namespace flash::sm80 {

struct ForwardCall {
  problem::Problem problem;
  common::Modifiers modifiers;
  int load_bytes, store_bytes;  // alignment of rows read: 16, 8, or an element beyond 16 bits; of rows written: any
  common::Sections sections;    // of planes (common/locate.cuh); a slot is a part of a tile of rows
  int row_tiles;                // of a plane
  int splits;                   // parts of the keys
  common::Divisor by_splits, by_heads, by_group;  // group: query heads per kv head
  float* part_out;                                // [splits, part_count, value_dim], if splits > 1
  float* part_lse;                                // [splits, part_count]
  int64_t part_count;                             // rows of all heads
};

// kRows query rows of one head and one part of the keys they see, in tiles of kKeys, walked from the last to the first.
template <int kRows, int kKeys>
struct Block {
  int batch, head, split;
  problem::Sequence sequence;
  problem::Interval interval;
  int64_t row;               // first row, inside the sequence
  int rows;                  // how many of kRows exist; <= 0: none
  int first, last;           // tiles of keys; first > last: none
  int full_first, full_end;  // of these, every row sees every key of [full_first, full_end)

  explicit __device__ __forceinline__ Block(const ForwardCall& call) {
    const problem::Problem& p = call.problem;
    const common::Sections::Place at = call.sections.find(blockIdx.x);
    uint32_t part, plane_head;
    int64_t tile = call.row_tiles - 1 - static_cast<int>(call.by_splits.divide(at.slot, &part));
    int64_t sequence_index = call.by_heads.divide(at.plane, &plane_head);  // packed: 0 so far
    split = static_cast<int>(part);
    head = static_cast<int>(plane_head);
    tile = common::find_piece(p.cu_seqlens_q, p.batch, kRows, tile, &sequence_index);
    batch = static_cast<int>(sequence_index);
    row = tile * kRows;
    sequence = problem::sequence(p, batch);
    interval = problem::interval(p, sequence.rows, sequence.keys);
    const int64_t left = row < 0 ? 0 : sequence.rows - row;  // row < 0: packed rows before the first sequence
    rows = left < kRows ? static_cast<int>(left) : kRows;
    const problem::Span any = interval.rows(row, row + rows), all = interval.common(row, row + rows);
    const bool none = any.first >= any.last;
    first = none ? 0 : static_cast<int>(any.first / kKeys);
    last = none ? -1 : static_cast<int>((any.last - 1) / kKeys);
    full_first = static_cast<int>(all.first < any.last ? (all.first + kKeys - 1) / kKeys : last + 1);
    full_end = all.last <= 0 ? 0 : static_cast<int>(all.last / kKeys);
    if (call.splits > 1) {
      const int tiles = (last - first) / call.splits + 1;
      first += split * tiles;
      last = min(first + tiles - 1, last);
    }
  }

  // A copy in shared memory, complete after the next barrier: the registers that all this would take are needed by the loop.
  __device__ __forceinline__ const Block& shared_at(uint8_t* place) const {
    static_assert(sizeof(Block) <= cuda::kSharedBlockBytes);
    Block& copy = *reinterpret_cast<Block*>(place);
    if (threadIdx.x == 0) copy = *this;
    return copy;
  }

  __device__ __forceinline__ bool full(int tile) const { return tile >= full_first && tile < full_end; }
  // The first FULL tile that the walk meets.
  __device__ __forceinline__ int first_full() const { return min(full_end - 1, last); }
};

// K or V of the block's head, read tile by tile from the last one down. Only the tile that is read first can reach past the end of
// the sequence, so the others come without predicates: one pointer per thread walks along.
template <class Loader, class Layout, int kKeys, bool kPlain>
class Stream {
 public:
  // dim: elements of a row; width: alignment of rows in bytes.
  __device__ __forceinline__ Stream(const problem::Array& array, int64_t dim, int width)
      : stride_(array.row * Layout::kElementBytes), row_bytes_(static_cast<int>(dim) * Layout::kElementBytes), width_(width) {}

  // The block's last tile to shared memory at `to`.
  template <class Rows>
  __device__ __forceinline__ void fetch_last(const ForwardCall& call, const problem::Array& array, const Rows& block,
                                             uint32_t to) {
    const problem::Sequence& sequence = block.sequence;
    base_ = static_cast<const char*>(array.data) +
            problem::offset(array, sequence.batch, call.by_group.divide(block.head), sequence.key) * Layout::kElementBytes;
    const int64_t key = int64_t{block.last} * kKeys;
    const int rows = static_cast<int>(min(sequence.keys - key, int64_t{kKeys}));
    if (wide()) {
      Loader::load(to, base_ + key * stride_, stride_, rows, row_bytes_);
      next_ = base_ + (key - kKeys + Loader::row()) * stride_ + Loader::chunk() * 16;
    } else {
      Loader::load_narrow(to, base_ + key * stride_, stride_, rows, row_bytes_, width_);
    }
  }

  // The tile before the one fetched last; lane: shared address of this thread's chunk in it.
  __device__ __forceinline__ void fetch(int tile, uint32_t to, uint32_t lane) {
    if (wide()) {
      Loader::load_inside(lane, next_, stride_, Loader::chunk() * 16 < row_bytes_);
      next_ -= kKeys * stride_;
    } else {
      Loader::load_narrow(to, base_ + int64_t{tile} * kKeys * stride_, stride_, kKeys, row_bytes_, width_);
    }
  }

  // Zeros behind the rows of `tiles` consecutive tiles: load_inside() leaves those columns alone, narrow loads write them.
  __device__ __forceinline__ void clear(uint32_t to, int tiles) const {
    if (wide()) Loader::clear_columns(to, tiles, row_bytes_);
  }

 private:
  __device__ __forceinline__ bool wide() const { return kPlain || width_ == 16; }

  const char* base_ = nullptr;
  int64_t stride_;
  int row_bytes_, width_;
  const char* next_ = nullptr;
};

// The block's query rows.
template <class Loader, class Layout, int kRows, int kKeys>
__device__ __forceinline__ void load_query(const ForwardCall& call, const Block<kRows, kKeys>& block, uint32_t to, bool wide) {
  const problem::Problem& p = call.problem;
  const int64_t start = problem::offset(p.query, block.sequence.batch, block.head, block.sequence.row + block.row);
  const char* from = static_cast<const char*>(p.query.data) + start * Layout::kElementBytes;
  const int64_t stride = p.query.row * Layout::kElementBytes;
  const int row_bytes = static_cast<int>(p.head_dim) * Layout::kElementBytes;
  if (wide) {
    Loader::load(to, from, stride, block.rows, row_bytes);
  } else {
    Loader::load_narrow(to, from, stride, block.rows, row_bytes, call.load_bytes);
  }
}

}  // namespace flash::sm80
