// sm90/forward_work.cuh: what a launch is told (ForwardArguments), how the work is cut into tiles, and in which order they are handed out.
// A tile is kRows query rows of one head; an index runs over all tiles of the call and is decoded on the device, where the lengths of
// packed sequences are.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "problem/problem.h"

namespace flash::sm90 {

// Tensor maps are 5-D: {dim, row, head, sequence, wrap} with boxes of 64 columns x rows.
//   dense:  row = row of the sequence, sequence = batch, wrap = 0: rows past the end are outside the tensor.
//   packed: row = kWrap - length + row, sequence = start + length, wrap = kWrap. The strides are such that the address is that of row
//   start + row modulo 2^64, while every row >= length lies outside the extent kWrap of its dimension: loads give zeros, stores are
//   dropped, so neighbours in the packed tensor are neither seen nor overwritten.
inline constexpr int kWrap = 1 << 30;

struct ForwardArguments {
  CUtensorMap query, key, value, out;  // of the boxes [rows, 64], [keys, 64], [keys, 64], [16, 64]
  float* lse;                          // [batch, heads, rows], packed [heads, total]; may be null
  int64_t lse_batch, lse_head;
  const float* sinks;                  // [heads] or null
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int total_rows, total_keys;
  int batch, heads, group;             // group: query heads per kv head
  int rows, keys;
  int left, right;                     // row i sees keys [i + diagonal - left, i + diagonal + right]; open ends are 2^29
  bool bottom_right;
  float scale_log2;                    // score * scale_log2 is the exponent; score is q.k, or tanh(q.k * cap_scale) when capped
  float cap_scale;
  int row_tiles;                       // tiles per head: dense per (batch, head), packed all slots of a head
  int tiles;                           // row_tiles * planes
  int planes;                          // dense batch * heads, packed heads
  int section;                         // planes handed out together, so that their K and V stay in L2; 0: one plane after the other
  unsigned* counter;                   // next tile, finished blocks: zero on entry and on exit
};

enum class Kind : int { kTile, kDrain, kEnd };  // kDrain: finish what was begun, then more may come

// A tile as the producer announces it. The consumers see key blocks [first, last], newest first; last >= first always.
struct Work {
  int row, head, first, last;   // row: first row of the tile in its sequence
  int rows, keys;               // lengths of the sequence
  int map_row, map_sequence;    // out's map: coordinates of row 0 of the sequence
  int index;                    // of the tile, to ask for it again
  Kind kind;
  int safe;                     // follow the row maximum in every block
};

// The last sequence that starts at or before `slot`, where sequence b starts at slot cu_seqlens[b] / unit + b (see common/locate.cuh).
__device__ __forceinline__ int sequence_of(const int32_t* cu_seqlens, int batch, int unit, int slot) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (cu_seqlens[middle] / unit + middle <= slot ? low : high) = middle;
  }
  return low;
}

// Where the producer loads from: coordinates of row 0 of the sequence in the maps of query, and of key and value.
struct Source {
  int query_row, query_sequence, key_row, key_sequence, wrap;
};

// Fills `work` and `source` for tile `index`; false if the slot is idle (packed sequences leave gaps).
template <int kRows, int kKeys>
__device__ __forceinline__ bool decode(const ForwardArguments& p, int index, Work& work, Source& source) {
  int plane, piece;
  if (p.section > 0) {  // longest rows first over a section of planes
    const int per = p.row_tiles * p.section, section = index / per, rest = index - section * per;
    const int planes = min(p.section, p.planes - section * p.section);
    piece = rest / planes;
    plane = section * p.section + rest % planes;
  } else {
    plane = index / p.row_tiles;
    piece = index - plane * p.row_tiles;
  }
  int batch = 0, query_start = 0, key_start = 0;
  work.rows = p.rows;
  work.keys = p.keys;
  if (p.cu_seqlens_q != nullptr) {
    work.head = plane;
    batch = sequence_of(p.cu_seqlens_q, p.batch, kRows, piece);
    query_start = min(max(p.cu_seqlens_q[batch], 0), p.total_rows);
    key_start = min(max(p.cu_seqlens_k[batch], 0), p.total_keys);
    work.rows = min(min(p.cu_seqlens_q[batch + 1], p.total_rows) - query_start, p.rows);
    work.keys = max(min(min(p.cu_seqlens_k[batch + 1], p.total_keys) - key_start, p.keys), 0);
    piece -= p.cu_seqlens_q[batch] / kRows + batch;
    if (piece * kRows >= work.rows) return false;
    piece = (work.rows + kRows - 1) / kRows - 1 - piece;
    source = {kWrap - work.rows, query_start + work.rows, kWrap - work.keys, key_start + work.keys, kWrap};
  } else {
    batch = plane / p.heads;
    work.head = plane - batch * p.heads;
    piece = p.section > 0 ? p.row_tiles - 1 - piece : piece;
    source = {0, batch, 0, batch, 0};
  }
  work.row = piece * kRows;
  work.map_row = source.query_row;
  work.map_sequence = source.query_sequence;
  work.index = index;
  // problem::Interval::rows() in 32 bits: the producer has few registers
  const int diagonal = p.bottom_right ? work.keys - work.rows : 0;
  const int first = max(work.row + diagonal - p.left, 0);
  const int last = min(min(work.row + kRows, work.rows) - 1 + diagonal + p.right, work.keys - 1);
  work.first = first <= last ? first / kKeys : 0;  // nothing is seen: one block, wholly masked
  work.last = first <= last ? last / kKeys : 0;
  return true;
}

}  // namespace flash::sm90
