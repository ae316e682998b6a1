// sm80/forward_block.cuh: what a forward kernel is called with, and which rows and keys one block of it owns.
// Blocks are numbered by sections of planes (heads) whose K and V fit the L2 cache together; inside a section the longest rows (the
// last ones under a causal mask) come first and the plane runs fastest.
#pragma once
#include "cuda/common/locate.cuh"
#include "cuda/common/score.cuh"
#include "cuda/tile/load.cuh"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/problem.h"

namespace flash::sm80 {

struct ForwardCall {
  problem::Problem problem;
  common::Modifiers modifiers;
  int load_bytes, store_bytes;  // alignment of rows read: 16, 8, or an element beyond 16 bits; of rows written: any
  int planes, row_tiles;        // common/locate.cuh: heads of all sequences or of one, and tiles of rows of each
  int splits;                   // parts of the keys
  int section;                  // planes per section
  float* part_out;              // [splits, part_count, value_dim], if splits > 1
  float* part_lse;              // [splits, part_count]
  int64_t part_count;           // rows of all heads
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
    const unsigned section = call.section, per_section = section * call.row_tiles * call.splits;
    const unsigned index = blockIdx.x / per_section, rest = blockIdx.x - index * per_section;
    const unsigned planes_here = min(section, call.planes - index * section);
    const unsigned part = rest / planes_here, plane = index * section + rest % planes_here;
    split = part % call.splits;
    int64_t tile = call.row_tiles - 1 - static_cast<int>(part / call.splits);
    int64_t sequence_index = p.cu_seqlens_q != nullptr ? 0 : plane / static_cast<unsigned>(p.heads);
    head = plane - static_cast<unsigned>(sequence_index) * static_cast<unsigned>(p.heads);
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
  __device__ __forceinline__ Stream(const problem::Array& array, const problem::Sequence& sequence, int64_t kv_head,
                                    int64_t dim, int width)
      : base_(static_cast<const char*>(array.data) +
              problem::offset(array, sequence.batch, kv_head, sequence.key) * Layout::kElementBytes),
        stride_(array.row * Layout::kElementBytes),
        row_bytes_(static_cast<int>(dim) * Layout::kElementBytes),
        width_(width) {}

  // The block's last tile to shared memory at `to`; keys: length of the sequence.
  __device__ __forceinline__ void fetch_last(int tile, int64_t keys, uint32_t to) {
    const int64_t key = int64_t{tile} * kKeys;
    const int rows = static_cast<int>(min(keys - key, int64_t{kKeys}));
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

  // Zeros behind the rows of `tiles` consecutive tiles: load_inside() leaves those columns alone.
  __device__ __forceinline__ void clear(uint32_t to, int tiles) const { Loader::clear_columns(to, tiles, row_bytes_); }

 private:
  __device__ __forceinline__ bool wide() const { return kPlain || width_ == 16; }

  const char* base_;
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
