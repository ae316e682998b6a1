// sm90/forward_work.cuh: what a launch is told (ForwardArguments), how the work is cut into tiles, and in which order they are handed out.
// A tile is kRows query rows of one head; an index runs over all tiles of the call and is decoded on the device, where the lengths of
// packed sequences are.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/ptx/memory.cuh"

namespace flash::sm90 {

// Tensor maps are 5-D: {dim, row, head, sequence, wrap} with boxes of 64 columns x rows.
//   dense:  row = row of the sequence, sequence = batch, wrap = 0: rows past the end are outside the tensor.
//   packed: row = kWrap - length + row, sequence = start + length, wrap = kWrap. The strides are such that the address is that of row
//   start + row modulo 2^64, while every row >= length lies outside the extent kWrap of its dimension: loads give zeros, stores are
//   dropped, so neighbours in the packed tensor are neither seen nor overwritten.
inline constexpr int kWrap = 1 << 30;

struct ForwardArguments {
  CUtensorMap query, key, value, out;  // of the boxes [rows of a part, 64], [keys, 64], [keys, 64], [16, 64]
  float* lse;                          // [batch, heads, rows], packed [heads, total]; may be null
  int64_t lse_batch, lse_head;
  const float* sinks;         // [heads] or null
  char* gaps;                 // out, if packed: rows that belong to no sequence are cleared
  int64_t gap_row, gap_head;  // strides of out, bytes
  int gap_chunks;             // of 16 bytes in a row of a head
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int total_rows, total_keys;
  int batch;
  common::Divisor heads, group;  // group: query heads per kv head
  int rows, keys;
  int left, right;  // row i sees keys [i + diagonal - left, i + diagonal + right]; open ends are 2^29
  bool bottom_right;
  bool edges;        // whether any block holds keys that a row does not see
  float scale_log2;  // score * scale_log2 is the exponent; score is q.k, or tanh(q.k * cap_scale) when capped
  float cap_scale;
  // Tiles are numbered section by section: planes (dense batch * heads, packed heads) handed out together, so that their K and V stay
  // in L2, the last rows of all of them first: causal ones see most keys. uneven false: all tiles are as long, plane after plane.
  bool uneven;
  int tiles, full_sections;               // of all planes; sections of full size, before one that may be smaller
  common::Divisor row_tiles;              // tiles per plane: dense per (batch, head), packed all slots of a head
  common::Divisor section_tiles;          // row_tiles * section
  common::Divisor section, last_section;  // planes in a section, in the last one
  unsigned* counter;                      // next tile, finished blocks: zero on entry and on exit
};

// kDrain: finish what was begun, then more may come. kPass: a tile in which the warpgroup has no rows.
enum class Kind : int { kTile, kDrain, kEnd, kPass };

// A tile as it is announced, in a slot of shared memory: 64 bytes, and for the forward the orders. Key blocks [first, last] are walked
// newest first; last >= first always.
struct Slot {
  uint32_t at;
  // Row (first of the tile), head, first, last.
  __device__ __forceinline__ uint32_t place() const { return at; }
  // Rows, keys; row 0 of the sequence in out's map: row, sequence.
  __device__ __forceinline__ uint32_t sequence() const { return at + 16; }
  // Whether sums overflowed, Kind, whether to follow every maximum, sink (bits of a float).
  __device__ __forceinline__ uint32_t fate() const { return at + 32; }
  // Kv head; row 0 of the keys in the maps: row, sequence, wrap.
  __device__ __forceinline__ uint32_t source() const { return at + 48; }
  // One word per warpgroup of the forward: its Kind, and times 4 the newest blocks of which it sees nothing.
  __device__ __forceinline__ uint32_t order(int group) const { return at + 64 + 4 * group; }

  // Single words of these.
  __device__ __forceinline__ uint32_t row() const { return at; }
  __device__ __forceinline__ uint32_t head() const { return at + 4; }
  __device__ __forceinline__ uint32_t last() const { return at + 12; }
  __device__ __forceinline__ uint32_t overflowed() const { return at + 32; }
  __device__ __forceinline__ uint32_t number() const { return at + 32; }  // in a stream instead: of the block's tiles
  __device__ __forceinline__ uint32_t kind() const { return at + 36; }
  __device__ __forceinline__ uint32_t safe() const { return at + 40; }
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

// Describes tile `index` in `slot`, all but its fate, with the orders of kGroups warpgroups; false if the index is idle (packed sequences
// leave gaps). Stores as it goes: the thread has few registers.
template <int kRows, int kKeys, int kGroups = 0>
__device__ __forceinline__ bool decode(const ForwardArguments& p, int index, Slot slot) {
  int plane, piece;
  if (p.uneven) {
    const int section = p.section_tiles.divide(index), rest = index - section * p.section_tiles.value();
    const bool full = section < p.full_sections;
    const int longer = full ? p.section.divide(rest) : p.last_section.divide(rest);
    piece = p.row_tiles.value() - 1 - longer;
    plane = section * p.section.value() + rest - longer * (full ? p.section.value() : p.last_section.value());
  } else {
    plane = p.row_tiles.divide(index);
    piece = index - plane * p.row_tiles.value();
  }
  int head = plane, rows = p.rows, keys = p.keys;
  if (p.cu_seqlens_q != nullptr) {
    const int batch = sequence_of(p.cu_seqlens_q, p.batch, kRows, piece);
    const int start = min(max(p.cu_seqlens_q[batch], 0), p.total_rows);
    rows = min(min(p.cu_seqlens_q[batch + 1], p.total_rows) - start, rows);
    piece -= start / kRows + batch;
    if (piece < 0 || piece * kRows >= rows) return false;  // piece < 0: before the first sequence
    const int key_start = min(max(p.cu_seqlens_k[batch], 0), p.total_keys);
    keys = max(min(min(p.cu_seqlens_k[batch + 1], p.total_keys) - key_start, keys), 0);
    ptx::store_shared(slot.sequence(), make_uint4(rows, keys, kWrap - rows, start + rows));
    ptx::store_shared(slot.source(), make_uint4(p.group.divide(head), kWrap - keys, key_start + keys, kWrap));
  } else {
    const int batch = p.heads.divide(plane);
    head -= batch * p.heads.value();
    ptx::store_shared(slot.sequence(), make_uint4(rows, keys, 0, batch));
    ptx::store_shared(slot.source(), make_uint4(p.group.divide(head), 0, batch, 0));
  }
  // problem::Interval::rows() in 32 bits
  const int row = piece * kRows, diagonal = p.bottom_right ? keys - rows : 0;
  const int first = max(row + diagonal - p.left, 0);
  const int last = min(min(row + kRows, rows) - 1 + diagonal + p.right, keys - 1);
  const bool seen = first <= last;  // else one block, wholly masked
  const int first_block = seen ? first / kKeys : 0, last_block = seen ? last / kKeys : 0;
  ptx::store_shared(slot.place(), make_uint4(row, head, first_block, last_block));
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int begin = row + 64 * group;
    const int mine = min(min(begin + 64, rows) - 1 + diagonal + p.right, keys - 1) / kKeys;
    const int ahead = max(last_block - max(mine, first_block), 0);
    ptx::store_shared(slot.order(group),
                      begin < rows ? ahead * 4 + static_cast<int>(Kind::kTile) : static_cast<int>(Kind::kPass));
  }
  return true;
}

}  // namespace flash::sm90
