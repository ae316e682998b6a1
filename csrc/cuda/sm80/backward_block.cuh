// sm80/backward_block.cuh: what the backward kernels are called with, which keys or rows a block owns, and how it reads the others.
#pragma once
#include "cuda/common/locate.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/scratch.h"
#include "cuda/common/sections.h"
#include "cuda/tile/load.cuh"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/problem.h"

namespace flash::sm80 {

struct BackwardCall {
  problem::Problem problem;
  problem::Gradients gradients;
  common::Modifiers modifiers;
  common::Scratch scratch;
  bool sum_dquery;              // the keys kernel adds up dQ: in the scratch, or in dq itself where that is fp32
  int load_bytes, store_bytes;  // alignment of rows read: 16, 8, or 4 in fp32; of rows written: any
  int pieces;                   // tiles per plane (common/locate.cuh)
  int64_t group;                // query heads per kv head
  common::Sections sections;    // of kv heads of all sequences; of the dQ kernel: of query heads
  common::Divisor by_heads;     // of these in a sequence
  common::Divisor by_group;
};

// The tile of a block: blocks with the longest walks (the first keys, under a causal mask) start first.
// kRows: the block owns query rows, the last (longest) ones first; else keys.
struct Owner {
  int64_t batch, head;  // head: of the kv heads if the block owns keys
  problem::Sequence sequence;
  problem::Interval interval;
  int64_t first;  // first row or key, inside the sequence
  int count;      // how many of the tile exist; <= 0: none

  template <bool kRows, int kTile>
  static __device__ __forceinline__ Owner find(const BackwardCall& call) {
    const problem::Problem& p = call.problem;
    const auto [plane, slot] = call.sections.find(blockIdx.x);
    const int32_t* lengths = kRows ? p.cu_seqlens_q : p.cu_seqlens_k;
    Owner o;
    uint32_t head;
    o.batch = call.by_heads.divide(plane, &head);  // packed: 0 so far
    o.head = head;
    const bool backwards = kRows && lengths == nullptr;
    const int64_t piece =
        common::find_piece(lengths, p.batch, kTile, backwards ? call.pieces - 1 - static_cast<int>(slot) : slot, &o.batch);
    o.sequence = problem::sequence(p, o.batch);
    o.interval = problem::interval(p, o.sequence.rows, o.sequence.keys);
    o.first = piece * kTile;
    const int64_t left = (kRows ? o.sequence.rows : o.sequence.keys) - o.first;
    o.count = piece < 0 ? 0 : static_cast<int>(min(left, int64_t{kTile}));
    return o;
  }
};

// Tiles [first, last] that a block walks over; of these [full_first, full_end) are FULL. first > last: none.
struct Walk {
  int first, last, full_first, full_end;

  __device__ __forceinline__ bool full(int tile) const { return tile >= full_first && tile < full_end; }
  __device__ __forceinline__ int count() const { return last - first + 1; }

  // any: lines that at least one of the block's sees; all: lines that every one of its kTile sees.
  template <int kTile>
  static __device__ __forceinline__ Walk over(problem::Span any, problem::Span all) {
    Walk w{0, -1, 0, 0};
    if (any.first >= any.last) return w;
    w.first = static_cast<int>(any.first / kTile);
    w.last = static_cast<int>((any.last - 1) / kTile);
    if (all.first >= all.last) return w;
    w.full_first = static_cast<int>((all.first + kTile - 1) / kTile);
    w.full_end = static_cast<int>(all.last / kTile);
    return w;
  }

  // Tiles of rows that the keys [key, key + count) meet. A tile of keys that reaches past the end is never FULL.
  template <int kRows, int kKeys>
  static __device__ __forceinline__ Walk over_rows(const Owner& o) {
    const int64_t rows = o.sequence.rows, end = o.first + o.count;
    problem::Span all{end - 1 - o.interval.diagonal - o.interval.right, o.first - o.interval.diagonal + o.interval.left + 1};
    if (all.first < 0) all.first = 0;
    if (all.last > rows) all.last = rows;
    if (o.count < kKeys) all.last = all.first;
    return over<kRows>(o.interval.viewers(o.first, end, rows), all);
  }

  // Tiles of keys that the rows [row, row + count) see.
  template <int kKeys>
  static __device__ __forceinline__ Walk over_keys(const Owner& o) {
    return over<kKeys>(o.interval.rows(o.first, o.first + o.count), o.interval.common(o.first, o.first + o.count));
  }
};

// Tiles of one array, read in order of their lines by all threads of a block; one pointer per thread walks along.
template <class Loader, class Layout, int kTile, bool kPlain>
class LineStream {
 public:
  // lines: length of the sequence; dim: elements of a line; width: alignment in bytes.
  __device__ __forceinline__ LineStream(int64_t row_stride, int64_t lines, int64_t dim, int width)
      : stride_(row_stride * Layout::kElementBytes),
        row_bytes_(static_cast<int>(dim) * Layout::kElementBytes),
        lines_(static_cast<int>(lines)),
        width_(width) {}

  // The next fetch() will be of tile `tile` of the sequence that starts at element `start` of the array.
  __device__ __forceinline__ void begin(const void* array, int64_t start, int tile) {
    base_ = static_cast<const char*>(array) + start * Layout::kElementBytes + int64_t{tile} * kTile * stride_;
  }

  // Tile `tile` to shared memory at `to`; lane: address of this thread's chunk there.
  __device__ __forceinline__ void fetch(int tile, uint32_t to, uint32_t lane) {
    const int lines = lines_ - tile * kTile;
    if (!kPlain && width_ != 16) {
      Loader::load_narrow(to, base_, stride_, min(lines, kTile), row_bytes_, width_);
    } else if (lines >= kTile) {
      Loader::load_inside(lane, base_ + Loader::row() * stride_ + Loader::chunk() * 16, stride_,
                          Loader::chunk() * 16 < row_bytes_);
    } else {
      Loader::load(to, base_, stride_, lines, row_bytes_);
    }
    base_ += kTile * stride_;
  }

  // Zeros behind the lines of `tiles` consecutive tiles: load_inside() leaves those columns alone, narrow loads write them.
  __device__ __forceinline__ void clear(uint32_t to, int tiles) const {
    if (kPlain || width_ == 16) Loader::clear_columns(to, tiles, row_bytes_);
  }

 private:
  int64_t stride_;
  int row_bytes_, lines_, width_;
  const char* base_ = nullptr;
};

// The block's own lines of one array, to shared memory at `to`. line: the owner's first, in the array; dim: elements of a line.
template <class Loader, class Layout, bool kPlain>
__device__ __forceinline__ void load_own(const BackwardCall& call, const Owner& owner, const problem::Array& a, int64_t line,
                                         int64_t dim, uint32_t to) {
  constexpr int kBytes = Layout::kElementBytes;
  const char* from = static_cast<const char*>(a.data) + problem::offset(a, owner.batch, owner.head, line) * kBytes;
  if (kPlain || call.load_bytes == 16) {
    Loader::load(to, from, a.row * kBytes, owner.count, static_cast<int>(dim) * kBytes);
  } else {
    Loader::load_narrow(to, from, a.row * kBytes, owner.count, static_cast<int>(dim) * kBytes, call.load_bytes);
  }
}

}  // namespace flash::sm80
