// sm90/backward_work.cuh: what a backward launch is told (BackwardArguments), how the work is cut into tiles, and in which order they
// are handed out. A tile is kKeys keys of one kv head; for each query head of its group the blocks of kRows rows that see them are
// walked, first to last.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace flash::sm90 {

struct BackwardArguments {
  CUtensorMap query, gradient, key, value;  // of the boxes [rows, 64], [rows, 64], [keys, 64], [keys, 64]; see forward_work.cuh
  CUtensorMap dkey, dvalue;                 // of the box [16, 64]
  // lse and delta of every row as a step of the products, see backward_prepare.cuh:
  // [blocks of kRows][kRows / 8][lse, delta][8 rows][8 elements], blocks per head, sequences as slots of forward_work.cuh when packed.
  const uint4* statistics;
  // Sums of dS K, private order of common/scratch.h: [blocks of 16 rows][columns / 8][128]; null: not wanted.
  float* dquery;
  // Where the main kernel clears the sums (backward_cleaner.cuh): slices cleared per plane; else null.
  unsigned* cleared;
  int64_t plane_bytes;          // of dquery
  int slice_bytes, ahead;       // ahead: tiles between what is cleared and what is taken
  int head_units, head_blocks;  // from one head to the next: blocks of statistics, of dquery
  int column_groups;            // columns / 8 of dquery
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int total_rows, total_keys;
  int heads, kv_heads, batch, group;  // group: query heads per kv head
  int rows, keys;
  int left, right;  // row i sees keys [i + diagonal - left, i + diagonal + right]; open ends are 2^29
  bool bottom_right, write_dkey, write_dvalue;
  float scale, scale_log2;  // P = 2^(scale_log2 (q.k + statistic)), or capped 2^(scale_log2 tanh(cap_scale q.k) + statistic)
  float cap_scale;
  unsigned unit;      // 2^16: no constant, lest ptxas makes shifts of products
  int key_tiles;      // tiles per kv head: dense per (batch, head), packed all slots of a head
  int tiles;          // key_tiles * planes
  int planes;         // dense batch * kv_heads, packed kv_heads
  int section;        // planes handed out together, so that their Q, dO and dQ stay in L2; 0: one plane after the other
  int given;          // first tiles that blocks have without asking: one each, or 0
  unsigned* counter;  // next tile but those, finished blocks: zero on entry and on exit
  // Where tiles take turns (backward_order.cuh): per tile and query head of its group, the first block of rows whose dQ it has not passed
  // on; blocks in a turn, a power of two.
  unsigned* passed;
  int turn;
  unsigned* finished;  // tiles whose dQ is added, per plane (backward_counter.cuh); null: not counted
};

// Of an lse this large fp32 keeps less than its whole part, and a P above 1 could grow without bound: moved up by its rounding.
__device__ __forceinline__ float bounded(float lse2) {
  return fabsf(lse2) < 0x1p24f ? lse2 : fmaf(fabsf(lse2), 0x1p-22f, lse2);
}

// Blocks of rows [first, last]; first > last: none.
struct Steps {
  int first, last;
  __device__ __forceinline__ bool contains(int m) const { return m >= first && m <= last; }
};

// Blocks of kRows rows with one that sees a key of [begin, end): problem::Interval::viewers() in 32 bits.
template <int kRows>
__device__ __forceinline__ Steps viewers(const BackwardArguments& p, int rows, int keys, int begin, int end) {
  const int diagonal = p.bottom_right ? keys - rows : 0;
  const int first = max(begin - diagonal - p.right, 0), last = min(min(end, keys) - 1 - diagonal + p.left, rows - 1);
  return begin < keys && first <= last ? Steps{first / kRows, last / kRows} : Steps{0, -1};
}

// Blocks of which every row sees every key of [begin, end): those need no mask. Rows past the end of the sequence do not matter, they
// are zeros; keys past the end do.
template <int kRows>
__device__ __forceinline__ Steps unmasked(const BackwardArguments& p, int rows, int keys, int begin, int end) {
  const int diagonal = p.bottom_right ? keys - rows : 0;
  const int first = max(end - 1 - diagonal - p.right, 0), end_row = begin - diagonal + p.left + 1;
  return end <= keys ? Steps{(first + kRows - 1) / kRows, max(end_row, 0) / kRows - 1} : Steps{0, -1};
}

// Which tile of which plane an index is. kTurns: where tiles take turns.
struct Place {
  int plane, piece;
};
template <bool kTurns>
__device__ __forceinline__ Place place_of(const BackwardArguments& p, int index) {
  if (p.section <= 0) return {index / p.key_tiles, index % p.key_tiles};
  // Most rows first over a section of planes; but in turns last keys first, which see no row before those that the next tile sees.
  const int per = p.key_tiles * p.section, section = index / per, rest = index - section * per;
  const int planes = min(p.section, p.planes - section * p.section), piece = rest / planes;
  return {section * p.section + rest % planes, kTurns ? p.key_tiles - 1 - piece : piece};
}

// A tile as the producer announces it, in a slot of shared memory: 64 bytes.
struct BackwardSlot {
  uint32_t at;
  // First key, kv head, first and last block of rows.
  __device__ __forceinline__ uint32_t place() const { return at; }
  // Rows, keys; key 0 in the maps: row, sequence.
  __device__ __forceinline__ uint32_t sequence() const { return at + 16; }
  // Row 0 in the maps: row, sequence; first block of statistics and of dquery, of head 0.
  __device__ __forceinline__ uint32_t source() const { return at + 32; }
  // Whether there is a tile; else the work is done.
  __device__ __forceinline__ uint32_t index() const { return at + 48; }
  // Of the first slot: the first tile of the block.
  __device__ __forceinline__ uint32_t begin() const { return at + 52; }
};

// Describes tile `index` in `slot`; false if the index is idle (packed sequences leave gaps).
template <int kRows, int kKeys, bool kTurns>
__device__ __forceinline__ bool decode(const BackwardArguments& p, int index, BackwardSlot slot) {
  const Place place = place_of<kTurns>(p, index);
  int piece = place.piece;
  int head = place.plane, rows = p.rows, keys = p.keys;
  if (p.cu_seqlens_k != nullptr) {
    const int batch = sequence_of(p.cu_seqlens_k, p.batch, kKeys, piece);
    const int key_start = min(max(p.cu_seqlens_k[batch], 0), p.total_keys);
    keys = min(min(p.cu_seqlens_k[batch + 1], p.total_keys) - key_start, keys);
    piece -= key_start / kKeys + batch;
    if (piece < 0 || piece * kKeys >= keys) return false;  // piece < 0: before the first sequence
    const int start = min(max(p.cu_seqlens_q[batch], 0), p.total_rows);
    rows = max(min(min(p.cu_seqlens_q[batch + 1], p.total_rows) - start, rows), 0);
    ptx::store_shared(slot.sequence(), make_uint4(rows, keys, kWrap - keys, key_start + keys));
    ptx::store_shared(slot.source(), make_uint4(kWrap - rows, start + rows, start / kRows + batch, start / 16 + batch));
  } else {
    const int batch = place.plane / p.kv_heads;
    head -= batch * p.kv_heads;
    ptx::store_shared(slot.sequence(), make_uint4(rows, keys, 0, batch));
    ptx::store_shared(slot.source(), make_uint4(0, batch, batch * p.heads * p.head_units, batch * p.heads * p.head_blocks));
  }
  const int first_key = piece * kKeys;
  Steps steps = viewers<kRows>(p, rows, keys, first_key, first_key + kKeys);
  ptx::store_shared(slot.place(), make_uint4(first_key, head, steps.first, steps.last));
  return true;
}

}  // namespace flash::sm90
