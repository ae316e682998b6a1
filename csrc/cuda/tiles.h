// cuda/tiles.h: the tiles of the CUDA kernels, one row per instance, each with its reason. The only place with tile sizes.
// problem::Plan::variant is an index into the table of the plan's direction; forward_variant() chooses it: an instance serves every
// dtype of its kind (fp16 and bf16, fp32, fp64), every mask and stride. The first row that fits is taken.
// Plain C++: the plan and the kernels read the same rows. What else plan, launch and kernels agree on: cuda/launch.cuh.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "cuda/common/scratch.h"
#include "problem/problem.h"

namespace flash::cuda {

enum class Body : uint8_t {
  kRows,   // a warp owns its query rows
  kWoven,  // the same; exponentials of one chunk of keys are written between the products of the next
  kWide,   // warps share query rows: keys are divided in Q K^T, columns in P V
  kTf32,   // fp32 on tensor cores
  kFma,    // one warp per row, plain arithmetic
};

struct ForwardTile {
  int bucket;  // largest head_dim and value_dim
  int rows;    // query rows of a block
  int keys;    // of a tile
  int warps;
  int resident;  // blocks per multiprocessor, for the register limit
  int stages;    // 2: K and V of the next tile travel while this one is computed; 1: K and V alternate
  int sharing;   // warps that share rows
  int terms;     // TF32 products for one fp32 product
  Body body;
  bool plain;  // no score modifiers, no dropout, 16-byte loads: has the optimistic body. Else: every feature at run time

  constexpr int threads() const { return warps * 32; }
};

// Measured on an H200 (sm_90, 227 KB of shared memory per block), 16k tokens, heads * dim = 2048.
inline constexpr ForwardTile kForwardTiles[] = {
    // 16-bit, plain. 32 query rows per warp: with 16, shared-memory reads of K and V bind.
    {64, 128, 64, 4, 3, 2, 1, 0, Body::kRows, true},    // 0: few keys: three small blocks fill the tail better, +3 to 6 %
    {64, 128, 128, 4, 2, 2, 1, 0, Body::kWoven, true},  // 1: Q stays in registers, half the barriers
    {96, 128, 64, 4, 2, 2, 1, 0, Body::kWoven, true},   // 2
    {128, 128, 64, 4, 2, 2, 1, 0, Body::kWoven, true},  // 3: 96 KB, so two blocks; 128 keys would spill, -22 %
    {192, 64, 64, 4, 2, 1, 2, 0, Body::kWide, true},    // 4: sharing halves the reads of K and V, so two blocks fit
    {256, 64, 64, 4, 2, 1, 2, 0, Body::kWide, true},    // 5
    // 16-bit, general: one body, the exact one; a second one spills and costs more than it gains.
    {64, 128, 128, 4, 2, 2, 1, 0, Body::kRows, false},  // 6
    {96, 128, 64, 4, 2, 2, 1, 0, Body::kRows, false},   // 7
    {128, 128, 64, 4, 2, 2, 1, 0, Body::kRows, false},  // 8
    {192, 64, 64, 4, 2, 1, 2, 0, Body::kWide, false},   // 9
    {256, 64, 64, 4, 2, 1, 2, 0, Body::kWide, false},   // 10
    {256, 64, 32, 4, 1, 1, 2, 0, Body::kWide, false},   // 11: 68 KB, for devices with 99 KB per block (sm_86, sm_89, sm_120)
    {512, 64, 64, 8, 1, 1, 4, 0, Body::kWide, false},   // 12: 201 KB
    {512, 32, 32, 4, 1, 1, 2, 0, Body::kWide, false},   // 13: 98 KB, for the others
    // fp32: three TF32 products give fp32 accuracy; one only where the caller allows TF32.
    {64, 128, 32, 4, 2, 2, 1, 3, Body::kTf32, false},   // 14
    {128, 128, 32, 4, 2, 1, 1, 3, Body::kTf32, false},  // 15: 99 KB, so two blocks
    {256, 64, 32, 4, 1, 1, 1, 3, Body::kTf32, false},   // 16: 130 KB
    {64, 128, 32, 4, 2, 2, 1, 1, Body::kTf32, false},   // 17
    {128, 128, 32, 4, 2, 1, 1, 1, Body::kTf32, false},  // 18
    {256, 64, 32, 4, 1, 1, 1, 1, Body::kTf32, false},   // 19
    // fp64, and fp32 that the tiles above do not take: right, not fast.
    {512, 4, 32, 4, 4, 1, 1, 0, Body::kFma, false},  // 20
};

// Whether a row has an instance for elements of so many bytes.
constexpr bool serves(const ForwardTile& t, int64_t element) {
  if (t.body == Body::kFma) return element >= 4;
  return element == (t.body == Body::kTf32 ? 4 : 2);
}

inline constexpr int kForwardVariants = sizeof(kForwardTiles) / sizeof(ForwardTile);

// What a block knows of its rows and keys and reads again where it needs it. fp32 up to 128 keeps that in registers: 99 KB are full.
inline constexpr int kSharedBlockBytes = 128;
constexpr bool block_in_shared(const ForwardTile& t) { return t.body != Body::kTf32 || t.bucket > 128; }

// Dynamic shared memory of a block, bytes. element: bytes of an element of query, key and value.
constexpr int64_t forward_shared_bytes(const ForwardTile& t, int64_t element) {
  if (t.body == Body::kFma) return 0;
  const int64_t row = t.bucket * element + (t.body == Body::kTf32 ? 16 : 0);
  const int64_t exchange = t.body == Body::kWide ? t.rows * t.keys * element + int64_t{4} * t.sharing * t.rows : 0;
  const int64_t block = block_in_shared(t) ? kSharedBlockBytes : 0;
  return (t.rows + int64_t{2} * t.stages * t.keys) * row + exchange + block;
}

// The smallest head dim of an instance that holds both, 0 if none does.
constexpr int bucket(int64_t head_dim, int64_t value_dim) {
  const int64_t dim = head_dim > value_dim ? head_dim : value_dim;
  for (const int size : {64, 96, 128, 192, 256, 512})
    if (dim <= size) return size;
  return 0;
}

// Width in bytes that every row of query, key, value and grad_out must at least be aligned to; others are copied to aligned rows first.
// 16-bit: reading them by 4 or 2 bytes takes 1.4 and 1.9 times as long, the copy 1.2 times (head dim 128, 2k tokens, H200).
constexpr int narrowest_load(problem::DType dtype) {
  return problem::size_of(dtype) == 2 ? 8 : static_cast<int>(problem::size_of(dtype));
}

// Whether a plain instance may take the call: scores that are scale * query . key alone, a scale that the exponential can fold in
// (positive, not extreme), 16-byte loads and stores. Sinks, windows, packed sequences and split keys are plain.
constexpr bool forward_plain(const problem::Problem& p, int load_bytes, int store_bytes) {
  return (p.dtype == problem::DType::kFloat16 || p.dtype == problem::DType::kBFloat16) && p.softcap == 0 &&
         p.mask.data == nullptr && p.alibi_slopes == nullptr && p.dropout_p == 0 && p.scale >= 1e-20 && p.scale <= 1e20 &&
         load_bytes == 16 && store_bytes == 16;
}

// Index into kForwardTiles, -1 if none fits. shared_memory: bytes one block may have; tf32: one TF32 product is accurate enough.
constexpr int forward_variant(const problem::Problem& p, int64_t shared_memory, bool plain, bool tf32 = false) {
  const int dim = bucket(p.head_dim, p.value_dim);
  const int64_t element = problem::size_of(p.dtype);
  const bool few_keys = p.keys <= 512 || (p.right < problem::kOpen && p.keys <= 1024);
  for (int i = 0; i < kForwardVariants; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (!serves(t, element) || (t.plain && !plain)) continue;
    if (dim == 0 || dim > t.bucket || forward_shared_bytes(t, element) > shared_memory) continue;
    if (t.body == Body::kTf32 && t.terms != (tf32 ? 1 : 3)) continue;
    if (t.plain && t.body == Body::kRows && !few_keys) continue;
    return i;
  }
  return -1;
}

// Split keys: partial results as cuda/launch.cuh lays them out for combine(): fp32 out [splits][lse count][value_dim], then
// lse [splits][lse count]. A sink is folded into the first part. fp64 is never split.
inline int64_t forward_workspace(const problem::Problem& p, int splits) {
  const int64_t count = p.heads * (p.packed() ? p.total_rows : p.batch * p.rows);
  return splits > 1 ? splits * count * (p.value_dim + 1) * int64_t{4} : 0;
}

enum class BackwardBody : uint8_t {
  kTensor,  // 16-bit, tensor cores
  kTf32,    // fp32 on tensor cores, three TF32 products for one
  kScalar,  // any type, head dim and alignment by plain arithmetic: right, not fast
};

// A block owns `keys` keys and walks over tiles of `rows` query rows.
struct BackwardTile {
  int bucket;  // largest head_dim and value_dim; 0: any
  int keys, rows;
  int warps;
  int resident;  // blocks per multiprocessor, for the register limit
  int stages;    // 2: the next tile of Q and dO travels while this one is computed
  int sharing;   // warps that share keys: they divide the rows of a tile, then the columns of dK and dV
  int chunk;     // rows that a warp multiplies at a time
  int dquery;    // the row of kRowGradientTiles that computes dQ where the result must be deterministic; -1: none
  BackwardBody body;
  bool plain;  // no score modifiers, no dropout, no mask gradient, 16-byte loads

  constexpr int threads() const { return warps * 32; }
};

// dQ by itself: a block owns `rows` query rows, a warp rows / warps of them, and walks over tiles of `keys`.
struct RowGradientTile {
  int bucket, rows, keys, warps, resident;
  BackwardBody body;
  bool plain;

  constexpr int threads() const { return warps * 32; }
};

inline constexpr RowGradientTile kRowGradientTiles[] = {
    {64, 128, 64, 4, 2, BackwardBody::kTensor, true},    // 0: 64 KB
    {96, 128, 32, 4, 2, BackwardBody::kTensor, true},    // 1: 72 KB
    {128, 128, 32, 4, 2, BackwardBody::kTensor, true},   // 2: 96 KB
    {192, 128, 32, 8, 1, BackwardBody::kTensor, true},   // 3: 144 KB; 32 rows per warp would not leave registers for S
    {256, 128, 32, 8, 1, BackwardBody::kTensor, true},   // 4: 192 KB
    {64, 128, 32, 4, 2, BackwardBody::kTensor, false},   // 5
    {128, 128, 32, 8, 1, BackwardBody::kTensor, false},  // 6: 16 rows per warp leave registers for the modifiers
    {256, 64, 32, 4, 1, BackwardBody::kTensor, false},   // 7: 128 KB
    {64, 64, 32, 4, 2, BackwardBody::kTf32, false},      // 8: 51 KB
    {128, 64, 32, 4, 2, BackwardBody::kTf32, false},     // 9: 99 KB
};

inline constexpr BackwardTile kBackwardTiles[] = {
    // 16-bit, plain. 32 keys per warp: with 16, shared-memory reads of Q and dO bind.
    {64, 128, 128, 4, 2, 1, 1, 32, 0, BackwardBody::kTensor, true},  // 0: P and dS stay in registers
    {96, 128, 64, 8, 1, 2, 2, 32, 1, BackwardBody::kTensor,
     true},  // 1: dK, dV of 32 keys and all columns would not fit registers
    {128, 128, 64, 8, 1, 2, 2, 32, 2, BackwardBody::kTensor, true},  // 2: 161 KB
    {192, 64, 64, 8, 1, 2, 4, 16, 3, BackwardBody::kTensor, true},   // 3: 160 KB
    {256, 64, 64, 8, 1, 2, 4, 16, 4, BackwardBody::kTensor, true},   // 4: 209 KB
    // 16-bit, general: chunks of 16 rows leave registers for the modifiers.
    {64, 128, 128, 4, 2, 1, 1, 16, 5, BackwardBody::kTensor, false},  // 5
    {128, 128, 64, 8, 1, 2, 2, 16, 6, BackwardBody::kTensor, false},  // 6
    {128, 64, 64, 4, 1, 1, 2, 16, 6, BackwardBody::kTensor, false},   // 7: 81 KB, for 99 KB per block (sm_86, sm_89, sm_120)
    {256, 64, 64, 8, 1, 1, 4, 16, 7, BackwardBody::kTensor, false},   // 8: 145 KB, so for 163 KB per block (sm_80) too
    {512, 32, 64, 8, 1, 1, 4, 16, -1, BackwardBody::kTensor, false},  // 9: 201 KB
    // fp32.
    {64, 64, 32, 4, 2, 1, 1, 32, 8, BackwardBody::kTf32, false},    // 10: 60 KB
    {128, 64, 32, 4, 2, 1, 1, 32, 9, BackwardBody::kTf32, false},   // 11: 108 KB, so two blocks
    {0, 64, 64, 8, 1, 1, 1, 64, -1, BackwardBody::kScalar, false},  // 12
};
inline constexpr int kBackwardVariants = sizeof(kBackwardTiles) / sizeof(BackwardTile);

// Dynamic shared memory of a block, bytes: K, V; Q, dO and their lse2, delta per stage; dS, and P where it crosses between warps.
constexpr int64_t backward_shared_bytes(const BackwardTile& t) {
  if (t.body == BackwardBody::kScalar) return 0;
  const bool tf32 = t.body == BackwardBody::kTf32;
  const int64_t row = tf32 ? t.bucket * 4 + 16 : t.bucket * 2;
  const int64_t weights = tf32 ? t.rows * (t.keys * 4 + t.warps * 16) : t.keys * t.rows * 2 * (t.sharing > 1 ? 2 : 1);
  const int64_t owner = t.plain ? 0 : kSharedBlockBytes;
  return 2 * t.keys * row + t.stages * (2 * t.rows * row + 8 * t.rows) + weights + owner;
}

// Q, dO and K, V; those in two stages in 16 bits.
constexpr int64_t row_gradient_shared_bytes(const RowGradientTile& t) {
  return t.body == BackwardBody::kTf32 ? 2 * (t.rows + t.keys) * int64_t{t.bucket * 4 + 16}
                                       : (2 * t.rows + 4 * t.keys) * int64_t{2} * t.bucket;
}

constexpr bool backward_plain(const problem::Problem& p, int load_bytes) { return forward_plain(p, load_bytes, 16); }

// Index into kBackwardTiles: the first row that fits.
constexpr int backward_variant(const problem::Problem& p, const problem::Gradients& g, int64_t shared_memory, int load_bytes) {
  const bool half = p.dtype == problem::DType::kFloat16 || p.dtype == problem::DType::kBFloat16;
  const bool plain = backward_plain(p, load_bytes);
  const int dim = bucket(p.head_dim, p.value_dim);
  for (int i = 0; i < kBackwardVariants; ++i) {
    const BackwardTile& t = kBackwardTiles[i];
    if (t.body == BackwardBody::kScalar) return i;
    const bool takes = t.body == BackwardBody::kTensor ? half : p.dtype == problem::DType::kFloat32;
    if (!takes || (t.plain && !plain) || dim == 0 || dim > t.bucket || backward_shared_bytes(t) > shared_memory) continue;
    if (g.deterministic && (t.dquery < 0 || row_gradient_shared_bytes(kRowGradientTiles[t.dquery]) > shared_memory)) continue;
    return i;
  }
  return -1;
}

// Whether the keys kernel adds up dQ, in the order of time, instead of leaving it to a kernel of its own.
inline bool sums_dquery(const problem::Gradients& g) { return g.dquery.data != nullptr && !g.deterministic; }

// The sums need scratch where dq is not fp32 itself.
inline bool scratch_dquery(const problem::Gradients& g, int variant) {
  return kBackwardTiles[variant].body == BackwardBody::kTensor && sums_dquery(g);
}

inline int64_t backward_workspace(const problem::Problem& p, const problem::Gradients& g, int variant) {
  return kBackwardTiles[variant].body == BackwardBody::kScalar ? 0 : common::scratch_bytes(p, scratch_dquery(g, variant));
}

}  // namespace flash::cuda
