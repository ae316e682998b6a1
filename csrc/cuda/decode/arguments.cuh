// decode/arguments.cuh: what a decode launch is given.
#pragma once
#include <cstdint>

#include "cuda/common/divisor.h"

namespace flash::decode {

// Division by a number that the host knows: n * divisor < 2^32. Without the shift of common::Divisor, which divides any n.
struct Divider {
  unsigned divisor = 1, inverse = 0;  // ceil(2^32 / divisor), 0 for 1
  Divider() = default;
  explicit Divider(unsigned d) : divisor(d), inverse(d <= 1 ? 0 : static_cast<unsigned>(((uint64_t{1} << 32) + d - 1) / d)) {}
  __device__ __forceinline__ int quotient(int n) const {
    return inverse == 0 ? n : static_cast<int>(__umulhi(static_cast<unsigned>(n), inverse));
  }
};

// Strides of an array [batch or entry, head, row], in elements.
struct Strides {
  int64_t batch, head, row;
};

struct Arguments {
  const void *query, *key, *value;
  void* out;
  float* lse;  // [batch, heads, rows]; may be null
  Strides query_strides, key_strides, value_strides, out_strides;
  int64_t lse_batch, lse_head;

  const int32_t *lengths, *left_pad, *batch_index;  // [batch], each may be null
  const int32_t* block_table;                       // [batch][table_stride], may be null
  int64_t table_stride;
  int page_size, entries;
  int appended, capacity;  // keys beyond lengths; the most keys of a sequence

  const float* alibi_slopes;  // [batch or 1, heads], may be null
  int64_t alibi_batch;
  const float* sinks;  // [heads], may be null

  int kv_heads, group, rows;  // heads / kv_heads; query rows of a sequence
  int head_dim, value_dim;    // multiples of 8
  int left, right;            // window
  bool bottom_right, capped, evict_first;
  float scale_log2;             // log2 units per unit of q . k; under a softcap of tanh
  float cap_scale;              // softcap: tanh(cap_scale * q . k), else 0
  Divider by_group, by_splits;  // lanes to rows; chunks to splits
  Divider by_share;             // items to CTAs of a cluster
  common::Divisor by_page{};    // keys to pages

  int first_batch, first_plane;  // of this launch
  int row_tiles, planes;         // tiles of query lanes per kv head; (kv head, tile) pairs of a sequence
  int splits;                    // parts of the keys, cluster CTAs included; with a unit: the most there can be
  int unit;                      // chunks of a part, for lengths that the host does not know; 0: `splits` equal parts
  int cluster, cluster_share;    // CTAs of a cluster; outputs (4 columns of a lane) that each of them finishes
  float* part_sums;              // [batch][planes][splits][lanes][bucket]
  float2* part_states;           // [batch][planes][splits][lanes] (maximum in log2 units, sum)
  unsigned* tickets;             // zero before and after every launch
};

}  // namespace flash::decode
