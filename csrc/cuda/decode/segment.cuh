// decode/segment.cuh: which query lanes and which keys a CTA works on. Lane n of a kv head is query row n / group of head n % group.
#pragma once
#include "cuda/decode/arguments.cuh"
#include "cuda/decode/tiles.h"

namespace flash::decode {

struct Segment {
  int batch, kv_head, plane;  // plane: (kv head, tile of lanes)
  int first_lane, lanes;      // of the kv head
  int length, pad, diagonal;  // row i sees keys [i + diagonal - left, i + diagonal + right] of [pad, length)
  int begin, end;             // keys that some row sees
  int safe_begin, safe_end;   // keys that every row sees
  int chunk, chunk_end;       // this CTA's share
  int parts;                  // CTAs that share the keys
  bool idle;                  // past the last part

  __device__ __forceinline__ int first_key(int row, int left) const { return max(pad, row + diagonal - left); }
  __device__ __forceinline__ int last_key(int row, int right) const { return min(length, row + diagonal + right + 1); }

  template <int kVariant>
  static __device__ __forceinline__ Segment find(const Arguments& a) {
    constexpr Tile kTile = kTiles[kVariant];
    Segment s;
    s.batch = a.first_batch + blockIdx.z;
    s.plane = a.first_plane + blockIdx.y;
    s.length = a.lengths == nullptr ? a.capacity : min(max(__ldg(a.lengths + s.batch) + a.appended, 0), a.capacity);
    s.pad = a.left_pad == nullptr ? 0 : max(__ldg(a.left_pad + s.batch), 0);
    const int tile = a.row_tiles == 1 ? 0 : s.plane % a.row_tiles;
    s.kv_head = a.row_tiles == 1 ? s.plane : s.plane / a.row_tiles;
    s.first_lane = tile * kTile.lanes;
    s.lanes = min(kTile.lanes, a.rows * a.group - s.first_lane);
    s.diagonal = a.bottom_right ? s.length - a.rows : 0;
    const int first = a.by_group.quotient(s.first_lane), last = a.by_group.quotient(s.first_lane + s.lanes - 1);
    s.begin = s.first_key(first, a.left);
    s.end = s.last_key(last, a.right);
    s.safe_begin = s.first_key(last, a.left);
    s.safe_end = s.last_key(first, a.right);
    if (s.begin >= s.end) s.begin = s.end = s.safe_end = 0;  // one chunk, all of it hidden

    const int base = s.begin / kTile.keys, chunks = max(1, (s.end + kTile.keys - 1) / kTile.keys - base);
    const int part = blockIdx.x;
    s.idle = false;
    if (a.unit > 0) {
      s.parts = (chunks + a.unit - 1) / a.unit;
      s.chunk = base + part * a.unit;
      s.chunk_end = min(base + chunks, s.chunk + a.unit);
      s.idle = part >= s.parts;
    } else {
      s.parts = a.splits;
      const int share = a.by_splits.quotient(chunks), rest = chunks - share * a.splits;
      s.chunk = base + part * share + min(part, rest);
      s.chunk_end = s.chunk + share + (part < rest);
    }
    return s;
  }
};

}  // namespace flash::decode
