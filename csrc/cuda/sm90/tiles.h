// sm90/tiles.h: the tiles of the Hopper kernels, one row per instance with its reason, and which calls they take.
// Plain C++: the plan and the kernels read the same rows.
#pragma once
#include <cstdint>
#include <initializer_list>

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
    // 0: four warpgroups hide each other's exponentials, which bind at this dim; small blocks waste little at the edge of a mask.
    // Causal 512 +26 %, 1k +24 %, 4k +5 % against 2 or 3 warpgroups and 128 keys; taking turns -2 to -6 %, exponentials in halves -1 to
    // -6 %.
    {64, 4, 64, 8, 2, 1, false, false, 32, 112},
    // 1: more keys a step, fewer waits: long rows without a mask +1 to +7 %.
    {64, 3, 128, 4, 2, 1, true, false, 32, 160},
    // 2: 225 KB. Without turns 0, causal -3 to -8 %. 64 keys: causal 512 and windows +3 %, longer -1 to -3 %; with three warpgroups causal
    // 512 +1 %, 1k and 2k -1 to -3 %, without a mask -1 to -3 %. All exponentials in one go -1 to -7 %.
    {128, 2, 128, 2, 2, 2, true, true, 56, 224},
    // 3: 225 KB; a second Q does not fit. With turns -1 %, in one go 0.
    {256, 2, 64, 2, 1, 2, false, true, 24, 240},
    // 4: narrow windows. A tile of 1024 keys ends and starts after 9 steps of variant 2, which takes as long as 1.5 of them (first
    // softmax, output, instructions that come once a tile); here a third warpgroup computes meanwhile, and 64 keys waste less at both
    // edges: windows of 256, 1024, 2048, 4096 keys +7, +5, +3, 0 %; without a window -2 to +2 %. All exponentials in one go 0.
    {128, 3, 64, 4, 1, 2, false, true, 32, 160},
};
inline constexpr int kForwardVariants = sizeof(kForwardTiles) / sizeof(ForwardTile);

constexpr int rows_of(const ForwardTile& tile) { return 64 * tile.warpgroups; }

// Parts in which Q is loaded. With one buffer, each warpgroup gets its rows as soon as it has done with those before: together they
// would wait for each other, and then both for Q.
constexpr int query_parts(const ForwardTile& tile) { return tile.queries > 1 ? 1 : tile.warpgroups; }

// Index into kForwardTiles for a call that fits, -1 if the head dims do not.
constexpr int forward_variant(const problem::Problem& p) {
  const int64_t dim = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  if (dim <= 64) return p.right < problem::kOpen || p.left < problem::kOpen || p.keys <= 1024 ? 0 : 1;
  if (dim <= 128) return p.left + p.right < 2048 && p.left + p.right < p.keys / 2 ? 4 : 2;
  return dim <= 256 ? 3 : -1;
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

// Whether tiles of `lines` (total over all sequences if packed) of all heads can be counted in 32 bits, with room to spare.
inline bool countable(const problem::Problem& p, int64_t heads, int64_t lines, int64_t total) {
  const int64_t tiles = p.packed() ? total / 64 + p.batch : p.batch * ((lines + 63) / 64);
  return tiles < (int64_t{1} << 30) / heads;
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
  if (!countable(p, p.heads, p.rows, p.total_rows) || !countable(p, p.kv_heads, p.keys, p.total_keys))
    return "they take fewer than 2^30 tiles of 64 rows";
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

// A tile is `keys` keys; blocks of `rows` rows are walked.
struct BackwardTile {
  int bucket;  // largest head_dim and value_dim; smaller ones are padded by TMA with zeros
  int rows, keys;
  int queries, gradients;  // buffers of Q, of dO
  bool sums;  // whether dQ is summed too, by a warpgroup of its own; else registers and room of dS serve the others
  // Blocks of rows after which a tile passes dQ on to the next tile of the head, so that all sums have one order (backward_order.cuh):
  // a power of two. 0: sums in the order of time.
  int turn = 0;
  int least = 0;  // blocks of rows from which on turns are faster than dQ by itself
};

inline constexpr BackwardTile kBackwardTiles[] = {
    {64, 128, 128, 3, 2, true},  // 0: 205 KB
    {128, 64, 128, 3, 2, true},  // 1: 215 KB; more rows leave no registers for S beside dK and dV
    {256, 64, 64, 2, 2, true},   // 2: 223 KB
    {64, 64, 128, 3, 2, true},   // 3: with softcap, whose slopes take the registers of the other 64 rows
    // 4: 207 KB. Three warpgroups: 5 % faster than two with 128 rows. lse and delta read by every thread: 15 to 36 % slower.
    {64, 64, 192, 6, 6, false},
    {128, 64, 128, 3, 3, false},  // 5: 199 KB
    {256, 64, 64, 2, 2, false},   // 6: 207 KB
    // 7 to 9: as 0 to 2, in turns. Longer turns need fewer fences, shorter ones let tiles follow each other closely. Beside dQ by itself:
    // 7: 512 rows -13 %, 1k +6 %, 4k +32 %, 8k +35 %; causal -4, +4, +22, +29 %. With 4 blocks a turn -2 to -16 %, 1 the same.
    {64, 128, 128, 3, 2, true, 2, 8},
    // 8: 1k rows -9 %, 2k +8 %, 4k +15 %, 8k +17 %; causal -13, +2, +11, +14 %. With 1 block a turn -1 to -12 %, 4 -2 to -6 %.
    {128, 64, 128, 3, 2, true, 2, 24},
    // 9: 1k rows -12 %, 2k 0, 4k +7 %, 8k +8 %, 16k +14 %; causal -4 to -21 %. With 2 blocks a turn -3 to +1 %.
    {256, 64, 64, 2, 2, true, 1, 48},
};
// Warpgroups beside that of dQ: 64 keys each, or two that share them.
constexpr int groups_of(const BackwardTile& tile) { return tile.keys == 64 ? 2 : tile.keys / 64; }
// Whether tiles can tell when their dQ is added, so that the kernel that converts dQ begins before all are done: without a mask +2 % at 1k
// and 2k rows. At dim 64 the code for it costs 2 % under a causal mask.
constexpr bool tells_finished(const BackwardTile& tile) { return tile.turn > 0 || (tile.sums && tile.bucket > 64); }
inline constexpr int kBackwardVariants = sizeof(kBackwardTiles) / sizeof(BackwardTile);

// dQ by itself, where it must be deterministic.
struct RowGradientTile {
  int bucket;
  int warpgroups;      // consumers, 64 query rows each
  int keys;            // of a step
  int stages, values;  // buffers of K, of V
  int producer_registers, consumer_registers;
};

// Measured on an H200, 8k rows. A second buffer of Q and dO and turns at issuing products gave nothing.
inline constexpr RowGradientTile kRowGradientTiles[] = {
    // 0: 145 KB. Two warpgroups with 128 keys 5 % slower, with 64 keys and S, dP a step ahead 14 %, with 96 keys and Q, dO in registers
    // 11 %; four with 48 keys 9 %; three with 80 keys the same.
    {64, 3, 64, 6, 6, 32, 160},
    {128, 2, 64, 4, 4, 24, 240},  // 1: 192 KB; 96 keys the same
    {256, 2, 64, 2, 1, 24, 240},  // 2: 224 KB
};

constexpr int rows_of(const RowGradientTile& tile) { return 64 * tile.warpgroups; }

constexpr int row_gradient_variant(const problem::Problem& p) {
  const int64_t dim = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  return dim <= 64 ? 0 : dim <= 128 ? 1 : 2;
}

constexpr int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Q, dO and dQ of heads that are worked on at the same time stay in L2. In turns 20 MB lose 0 to 10 %, 80 MB up to 28 %.
inline constexpr int64_t kSectionBytes = 40 << 20;
constexpr int64_t section_bytes_of_head(const problem::Problem& p) {
  return p.rows * ((p.head_dim + p.value_dim) * 2 + p.head_dim * 4);
}

// Planes (sequence, kv head) whose tiles take turns, handed out together. The tiles of a plane are spread over all rows of all its query
// heads. The last section has at least half as many planes as the others: in a smaller one tiles would wait.
constexpr int64_t turn_section(const problem::Problem& p) {
  const int64_t planes = p.batch * p.kv_heads, most = kSectionBytes / (p.heads / p.kv_heads * section_bytes_of_head(p));
  int64_t section = most < 1 ? 1 : most < planes ? most : planes;
  while (planes % section != 0 && 2 * (planes % section) < section) --section;
  return section;
}

// Whether tiles of a row of kBackwardTiles can take turns without waiting much, on so many multiprocessors. Then dQ beside dK and dV, in
// 5 products, is faster than by itself, in 7. Tiles that run side by side in a plane begin a turn apart, and half a step to pass it on;
// under a mask the next one has rows of its own to begin with, and an average tile half the steps. They must fit into the length of a
// tile. And a sixth of the whole time must be enough for all to begin or, under a mask, where the longest tiles come last, to end.
inline bool passes_on(const problem::Problem& p, const BackwardTile& tile, int64_t multiprocessors) {
  if (p.packed()) return false;  // lengths are known to the GPU alone
  const bool masked = p.left < problem::kOpen || p.right < problem::kOpen;
  const int64_t key_tiles = divide_up(p.keys, tile.keys), units = divide_up(p.rows, tile.rows);
  if (units < tile.least || (masked && tile.bucket > 128)) return false;  // as measured
  if (key_tiles >= 256 * units) return false;  // a thread of the kernel before clears what a tile has passed on
  const int64_t tiles = p.batch * p.kv_heads * key_tiles, blocks = tiles < multiprocessors ? tiles : multiprocessors;
  const int64_t seen = p.left + p.right + tile.keys;  // rows, by a tile
  const int64_t steps = (seen < p.rows ? divide_up(seen < 0 ? 0 : seen, tile.rows) : units) * (p.heads / p.kv_heads);
  const int64_t room = 2 * steps * turn_section(p), apart = 2 * tile.turn + 1;  // half steps
  if (!masked) return room >= apart * blocks && room * tiles >= 6 * apart * blocks * blocks;
  const int64_t own = 2 * (tile.keys / tile.rows);
  return room >= 2 * (apart > own ? apart - own : 1) * blocks && tiles >= 6 * blocks;
}

// Index into kBackwardTiles for a call that fits, -1 if the head dims do not. Rows 0 to 2 sum dQ up in the order of time, 7 to 9 in turns,
// 4 to 6 not at all.
inline int backward_variant(const problem::Problem& p, const problem::Gradients& g, int64_t multiprocessors) {
  const int64_t dim = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  if (dim > 256) return -1;
  const int bucket = dim <= 64 ? 0 : dim <= 128 ? 1 : 2;
  if (p.softcap > 0) return bucket == 0 ? 3 : bucket;
  if (g.dquery.data != nullptr && !g.deterministic) return bucket;
  const bool beside = g.dquery.data != nullptr && (g.dkey.data != nullptr || g.dvalue.data != nullptr);
  return beside && passes_on(p, kBackwardTiles[7 + bucket], multiprocessors) ? 7 + bucket : 4 + bucket;
}

// Why a backward call goes to sm80/, as the end of a sentence; null if the Hopper backward takes it.
inline const char* backward_refusal(const problem::Problem& p, const problem::Gradients& g) {
  if (const char* refusal = forward_refusal(p); refusal != nullptr) return refusal;
  // lse / scale joins the products as a sum of numbers of the element type (backward_prepare.cuh): in float16 it ends at 2^32.
  if (p.dtype == problem::DType::kFloat16 && p.softcap == 0 && p.scale < 1e-6)
    return "they take float16 with a scale from 1e-6 on";
  if (g.deterministic && p.softcap > 0) return "they have no deterministic gradients with softcap";
  const auto written = [&](const problem::Array& a, int64_t heads) { return a.data == nullptr || addressable(p, a, heads); };
  if (!addressable(p, g.dout, p.heads) || !written(g.dquery, p.heads) || !written(g.dkey, p.kv_heads) ||
      !written(g.dvalue, p.kv_heads))
    return "they take 16-byte aligned gradients with strides of multiples of 16 bytes and no broadcast dimensions";
  return nullptr;
}

// gradients: null for forward.
inline const char* refusal(const problem::Problem& p, const problem::Gradients* gradients) {
  return gradients == nullptr ? forward_refusal(p) : backward_refusal(p, *gradients);
}

// Tiles of keys a launch hands out.
inline int64_t backward_tiles(const problem::Problem& p, int variant) {
  const int64_t keys = kBackwardTiles[variant].keys;
  return p.packed() ? p.kv_heads * (p.total_keys / keys + p.batch) : p.batch * p.kv_heads * ((p.keys + keys - 1) / keys);
}

// Tiles of rows of the same where dQ is computed by itself.
inline int64_t row_gradient_tiles(const problem::Problem& p) {
  const int64_t rows = rows_of(kRowGradientTiles[row_gradient_variant(p)]);
  return p.packed() ? p.heads * (p.total_rows / rows + p.batch) : p.batch * p.heads * ((p.rows + rows - 1) / rows);
}

// The workspace of a backward call, bytes: the counters; those of cleared slices, one a plane; behind them those of finished tiles, one a
// plane, and what tiles have passed on, one per tile and query head; statistics, 32 bytes a row, in blocks of a tile's rows; sums of dQ,
// 4 bytes an element, in blocks of 16 rows (common/scratch.h).
struct BackwardWorkspace {
  int64_t head_units;   // blocks of statistics from one head to the next
  int64_t head_blocks;  // the same of sums
  int64_t turns;        // counts of what tiles have passed on
  int64_t cleared_at, finished_at, turns_at, statistics_at, dquery_at, bytes;
};

// Heads run in slabs of so many kv heads, one after the other, that the sums of dQ stay below this: else long sequences would need
// twice the memory of their dQ once more. A million tokens of 32 heads of 128: 2 GiB instead of 16.
inline constexpr int64_t kMostSumBytes = int64_t{2} << 30;

inline int64_t backward_slab(const problem::Problem& p, const problem::Gradients& g, int variant) {
  if (g.dquery.data == nullptr || !kBackwardTiles[variant].sums) return p.kv_heads;
  const int64_t rows = p.packed() ? p.total_rows : p.batch * p.rows;
  const int64_t fit = kMostSumBytes / (p.heads / p.kv_heads * rows * p.head_dim * 4);
  return fit < 1 ? 1 : fit < p.kv_heads ? fit : p.kv_heads;
}

// The kv heads [first, first + count) of a call, as a call.
inline problem::Problem slab_of(problem::Problem p, problem::Gradients* g, int64_t first, int64_t count) {
  const int64_t group = p.heads / p.kv_heads, bytes = problem::size_of(p.dtype);
  const auto advance = [&](problem::Array& a, int64_t heads) {
    if (a.data != nullptr) a.data = static_cast<char*>(a.data) + heads * a.head * bytes;
  };
  for (problem::Array* a : {&p.query, &p.out, &g->dout, &g->dquery}) advance(*a, first * group);
  for (problem::Array* a : {&p.key, &p.value, &g->dkey, &g->dvalue}) advance(*a, first);
  const int64_t rows = first * group * p.lse_head;
  p.lse = static_cast<float*>(p.lse) + rows;
  if (g->dlse != nullptr) g->dlse = static_cast<const float*>(g->dlse) + rows;
  g->delta = static_cast<float*>(g->delta) + rows;
  p.heads = count * group;
  p.kv_heads = count;
  return p;
}

inline BackwardWorkspace backward_workspace(const problem::Problem& p, const problem::Gradients& g, int variant) {
  const BackwardTile& tile = kBackwardTiles[variant];
  const int64_t rows = tile.rows;
  const auto blocks = [&](int64_t unit) { return p.packed() ? p.total_rows / unit + p.batch : (p.rows + unit - 1) / unit; };
  const int64_t planes = p.heads * (p.packed() ? 1 : p.batch);
  BackwardWorkspace w{};
  w.head_units = blocks(rows);
  w.head_blocks = blocks(16);
  w.turns = tile.turn > 0 ? planes * divide_up(p.keys, tile.keys) : 0;
  w.cleared_at = 256;
  w.finished_at = w.cleared_at + (p.packed() ? 0 : p.batch * p.kv_heads * 4);
  w.turns_at = w.finished_at + (w.finished_at - w.cleared_at);
  w.statistics_at = (w.turns_at + w.turns * 4 + 255) / 256 * 256;
  w.dquery_at = w.statistics_at + planes * w.head_units * rows * 32;
  w.bytes = w.dquery_at + (g.dquery.data != nullptr && tile.sums ? planes * w.head_blocks * 16 * p.head_dim * 4 : 0);
  return w;
}

inline constexpr int64_t kForwardWorkspace = 16;  // the counters of ForwardArguments, where the stream has none

}  // namespace flash::sm90
