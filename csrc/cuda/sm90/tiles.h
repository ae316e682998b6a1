// sm90/tiles.h: the tiles of the Hopper kernels, one row per instance with its reason, and which calls they take.
// Plain C++: the plan and the kernels read the same rows.
#pragma once
#include <cstdint>

#include "problem/problem.h"

namespace flash::sm90 {

struct ForwardTile {
  int bucket;      // largest head_dim and value_dim; smaller ones are padded by TMA with zeros
  int warpgroups;  // consumers, 64 query rows each
  int keys;        // of a step
  int stages;      // buffers of K and of V
  int queries;     // buffers of Q: 2 let the next tile be announced early
  int outputs;     // staging panels of O per warp
  bool turns;      // ping-pong: warpgroups take turns at issuing products
  bool halves;     // half of the exponentials run while P V of the block before does
  int producer_registers, consumer_registers;
};

// Measured on an H200, 16k tokens, heads * dim = 2048.
inline constexpr ForwardTile kForwardTiles[] = {
    {64, 2, 128, 4, 2, 1, true, false, 56, 224},  // 0: causal up to 1k keys: smaller tiles fill the tail better, +13 % at 512
    {64, 3, 128, 4, 2, 1, true, false, 32, 160},  // 1: a third warpgroup covers the exponentials, which bind at this dim
    {128, 2, 128, 2, 2, 2, true, true, 56, 224},  // 2: 225 KB
    {256, 2, 64, 2, 1, 2, false, true, 24, 240},  // 3: 225 KB; a second Q does not fit
};
inline constexpr int kForwardVariants = sizeof(kForwardTiles) / sizeof(ForwardTile);

constexpr int rows_of(const ForwardTile& tile) { return 64 * tile.warpgroups; }

// Index into kForwardTiles for a call that fits, -1 if the head dims do not.
constexpr int forward_variant(const problem::Problem& p) {
  const int64_t dim = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  if (dim <= 64) return p.right < problem::kOpen && p.keys <= 1024 ? 0 : 1;
  return dim <= 128 ? 2 : dim <= 256 ? 3 : -1;
}

// What TMA can address: 16-byte aligned bases and strides below 2^40 bytes; a packed row stride below 2^34. Broadcast (stride 0)
// dimensions of more than one entry are left to sm80/.
inline bool addressable(const problem::Problem& p, const problem::Array& a, int64_t heads) {
  const int64_t bytes = problem::size_of(p.dtype);
  const auto fits = [&](int64_t stride, int64_t count) {
    return count <= 1 || (stride > 0 && stride * bytes % 16 == 0 && stride * bytes < (int64_t{1} << (p.packed() ? 34 : 40)));
  };
  return reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && fits(a.row, 2) && fits(a.head, heads) &&
         fits(a.batch, p.packed() ? 1 : p.batch);
}

// Why a call goes to sm80/, as the end of a sentence; null if the Hopper forward takes it: scores that are scale * query . key, capped
// or not, lengths that 32-bit coordinates hold, tensors that TMA can address.
inline const char* forward_refusal(const problem::Problem& p) {
  const int64_t limit = int64_t{1} << 29;
  if (p.dtype != problem::DType::kFloat16 && p.dtype != problem::DType::kBFloat16) return "they take float16 and bfloat16";
  if (forward_variant(p) < 0) return "they take head dims up to 256";
  if (p.mask.data != nullptr) return "they take no attn_mask";
  if (p.alibi_slopes != nullptr) return "they take no alibi_slopes";
  if (p.dropout_p > 0) return "they take no dropout";
  if (!(p.scale >= 1e-20 && p.scale <= 1e20)) return "they take a positive scale";
  if (p.rows <= 0 || p.keys <= 0) return "they take no empty tensors";
  if (p.rows >= limit || p.keys >= limit || p.total_rows >= limit || p.total_keys >= limit)
    return "they take lengths below 2^29";
  if (p.head_dim % 8 != 0 || p.value_dim % 8 != 0) return "they take head dims that are multiples of 8";
  if (!addressable(p, p.query, p.heads) || !addressable(p, p.key, p.kv_heads) || !addressable(p, p.value, p.kv_heads) ||
      !addressable(p, p.out, p.heads))
    return "they take 16-byte aligned tensors with strides of multiples of 16 bytes and no broadcast dimensions";
  return nullptr;
}

// Tiles of query rows a launch hands out.
inline int64_t forward_tiles(const problem::Problem& p, int variant) {
  const int64_t rows = rows_of(kForwardTiles[variant]);
  return p.packed() ? p.heads * (p.total_rows / rows + p.batch) : p.batch * p.heads * ((p.rows + rows - 1) / rows);
}

inline constexpr int64_t kForwardWorkspace = 16;  // the counters of ForwardArguments, where the stream has none

}  // namespace flash::sm90
