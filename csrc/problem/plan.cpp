// problem/plan.cpp: which kernel runs a call, on which tile, in how many blocks and parts, through how wide loads.
// Everything follows from the problem and the device, so equal calls run equally and results are reproducible.
#include "problem/plan.h"

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/tiles.h"
#include "cuda/tiles.h"
#include "problem/decode.h"
#include "problem/mask.h"

namespace flash::problem {
namespace {

constexpr int64_t kMaxBlocks = 2147483647;  // CUDA C++ Programming Guide, compute capabilities: x dimension of a grid
constexpr int64_t kReservedMemory = 1024;   // the same: shared memory that the system takes of every block

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The widest access, up to 16 bytes, that base, strides and length of every row of an operand are multiples of.
int width(const Array& array, int64_t dim, int64_t element_bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(array.data) |
                        static_cast<uint64_t>((array.batch | array.head | array.row | dim) * element_bytes) | 16u;
  return static_cast<int>(bits & (~bits + 1));
}

// Sets load_bytes, store_bytes and copies. Operands narrower than `narrowest` are copied, after which they are 16 bytes wide.
void choose_widths(Plan& plan, const Problem& p, const Gradients* g, int narrowest) {
  const int64_t bytes = size_of(p.dtype);
  plan.load_bytes = plan.store_bytes = 16;
  const auto load = [&](Operand operand, const Array& array, int64_t dim) {
    const int found = width(array, dim, bytes);
    if (found < narrowest) {
      plan.copies |= operand;
    } else {
      plan.load_bytes = std::min(plan.load_bytes, found);
    }
  };
  const auto store = [&](const Array& array, int64_t dim) {
    if (array.data != nullptr) plan.store_bytes = std::min(plan.store_bytes, width(array, dim, bytes));
  };
  load(kQuery, p.query, p.head_dim);
  load(kKey, p.key, p.head_dim);
  load(kValue, p.value, p.value_dim);
  if (g == nullptr) {
    store(p.out, p.value_dim);
  } else {
    load(kOutputGradient, g->dout, p.value_dim);
    store(g->dquery, p.head_dim);
    store(g->dkey, p.head_dim);
    store(g->dvalue, p.value_dim);
  }
}

// Pieces of `unit` rows (or keys) of all heads. Packed: what holds them whatever the lengths, which only the device knows.
int64_t pieces(const Problem& p, int64_t heads, int64_t longest, int64_t total, int64_t unit) {
  return heads * (p.packed() ? total / unit + p.batch : p.batch * ceil_div(longest, unit));
}

// Tiles of keys that the last block of rows, which sees the most under a causal mask, walks over.
int64_t key_tiles(const Problem& p, int64_t tile_rows, int64_t tile_keys) {
  const Span span = interval(p, p.rows, p.keys).rows(std::max<int64_t>(0, p.rows - tile_rows), p.rows);
  return span.last <= span.first ? 1 : ceil_div(span.last - span.first, tile_keys);
}

// Few blocks leave multiprocessors idle: cut the keys. The fewest parts within 10 % of the best use of whole waves.
// A part has at least 4 tiles, so that the fp32 partial results it writes stay small beside the keys it reads.
int choose_splits(int64_t blocks, int64_t slots, int64_t tiles) {
  if (slots <= 0 || blocks * 10 > slots * 8) return 1;
  const int64_t most = std::min<int64_t>({tiles / 4, 64, ceil_div(slots, blocks)});
  const auto use = [&](int64_t splits) {
    const int64_t total = blocks * splits;
    return static_cast<double>(total) / static_cast<double>(ceil_div(total, slots) * slots);
  };
  double best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) best = std::max(best, use(splits));
  for (int64_t splits = 1; splits <= most; ++splits)
    if (use(splits) >= 0.9 * best) return static_cast<int>(splits);
  return 1;
}

Plan refuse(Plan plan, Refusal reason) {
  plan.family = Family::kNone;
  plan.refused |= reason;
  return plan;
}

Plan forward_sm80(const Problem& p, const Device& device, Plan plan) {
  choose_widths(plan, p, nullptr, cuda::narrowest_load(p.dtype));
  plan.variant =
      cuda::forward_variant(p, device.shared_memory, cuda::forward_plain(p, plan.load_bytes, plan.store_bytes), p.tf32);
  if (plan.variant < 0) return plan;
  const cuda::ForwardTile& row = cuda::kForwardTiles[plan.variant];
  plan.head_dim = row.bucket;
  plan.plain = row.plain;
  plan.tile_rows = row.rows;
  plan.tile_keys = row.keys;
  const int64_t blocks = pieces(p, p.heads, p.rows, p.total_rows, row.rows);
  if (!p.fp64()) {
    const int64_t block_memory = cuda::forward_shared_bytes(row, size_of(p.dtype)) + kReservedMemory;
    const int64_t resident = std::min<int64_t>(row.resident, std::max<int64_t>(1, device.multiprocessor_memory / block_memory));
    plan.splits = choose_splits(blocks, device.multiprocessors * resident, key_tiles(p, row.rows, row.keys));
  }
  plan.blocks = blocks * plan.splits;
  plan.workspace_bytes = cuda::forward_workspace(p, plan.splits);
  return plan;
}

Plan backward_sm80(const Problem& p, const Gradients& g, const Device& device, Plan plan) {
  choose_widths(plan, p, &g, cuda::narrowest_load(p.dtype));
  plan.variant = cuda::backward_variant(p, g, device.shared_memory, plan.load_bytes);
  if (plan.variant < 0) return plan;
  const cuda::BackwardTile& row = cuda::kBackwardTiles[plan.variant];
  plan.head_dim = row.bucket;
  plan.plain = row.plain;
  plan.tile_rows = row.rows;
  plan.tile_keys = row.keys;
  plan.blocks = pieces(p, p.kv_heads, p.keys, p.total_keys, row.keys);
  plan.workspace_bytes = cuda::backward_workspace(p, g, plan.variant);
  return plan;
}

Plan plan_sm80(const Problem& p, const Gradients* g, const Device& device, Plan plan) {
  if (device.major < 8) return refuse(plan, kRefusedArchitecture);
  plan.family = Family::kSm80;
  plan = g == nullptr ? forward_sm80(p, device, plan) : backward_sm80(p, *g, device, plan);
  if (plan.variant < 0)
    return refuse(plan, cuda::bucket(p.head_dim, p.value_dim) == 0 ? kRefusedHeadDim : kRefusedSharedMemory);
  if (g != nullptr) {
    // The kernels of rows around the one of keys: with broadcast keys and many heads they are the larger ones.
    const int64_t rows = pieces(p, p.heads, p.rows, p.total_rows, common::kPrepareRows);
    if (rows > kMaxBlocks) plan.blocks = rows;
  }
  return plan.blocks > kMaxBlocks ? refuse(plan, kRefusedGrid) : plan;
}

// The Hopper forward for a call that it takes.
Plan forward_sm90(const Problem& p, const Device& device) {
  Plan plan;
  plan.family = Family::kSm90;
  plan.variant = sm90::forward_variant(p);
  const sm90::ForwardTile& row = sm90::kForwardTiles[plan.variant];
  plan.head_dim = row.bucket;
  plan.plain = true;
  plan.tile_rows = sm90::rows_of(row);
  plan.tile_keys = row.keys;
  plan.load_bytes = plan.store_bytes = 16;
  plan.blocks = std::min<int64_t>(sm90::forward_tiles(p, plan.variant), device.multiprocessors);
  plan.workspace_bytes = sm90::kForwardWorkspace;
  return plan;
}

// The Hopper backward for a call that it takes.
Plan backward_sm90(const Problem& p, const Gradients& g, const Device& device) {
  Plan plan;
  plan.family = Family::kSm90;
  plan.direction = Direction::kBackward;
  plan.variant = sm90::backward_variant(p, g, device.multiprocessors);
  const sm90::BackwardTile& row = sm90::kBackwardTiles[plan.variant];
  plan.head_dim = row.bucket;
  plan.plain = true;
  plan.tile_rows = row.rows;
  plan.tile_keys = row.keys;
  plan.load_bytes = plan.store_bytes = 16;
  plan.blocks = std::min<int64_t>(sm90::backward_tiles(p, plan.variant), device.multiprocessors);
  if (g.dquery.data != nullptr && !row.sums)
    plan.row_blocks = std::min<int64_t>(sm90::row_gradient_tiles(p), device.multiprocessors);
  Gradients first = g;
  const Problem slab = sm90::slab_of(p, &first, 0, sm90::backward_slab(p, g, plan.variant));
  plan.workspace_bytes = sm90::backward_workspace(slab, first, plan.variant).bytes;
  return plan;
}

}  // namespace

Plan plan(const Problem& p, const Gradients* g, const Device& device, Choice choice) {
  Plan plan;
  plan.direction = g == nullptr ? Direction::kForward : Direction::kBackward;
  if (!device.cuda) {
    plan.family = Family::kCpu;
    return plan;
  }
  if (g == nullptr && choice == Choice::kAny && decode_takes(p, device)) return plan_decode(as_decode(p), device);
  if (!device.sm90 && choice != Choice::kSm90) return plan_sm80(p, g, device, plan);  // one family
  const bool taken = device.sm90 && sm90::refusal(p, g) == nullptr;
  const auto fast = [&] { return g == nullptr ? forward_sm90(p, device) : backward_sm90(p, *g, device); };
  if (choice == Choice::kSm90) return taken ? fast() : refuse(plan, kRefusedForced);
  Plan general = plan_sm80(p, g, device, plan);
  if (choice == Choice::kSm80) return general;
  if (taken && general.splits == 1) return fast();
  general.refused |= taken ? kRefusedSplit : kRefusedSm90;
  return general;
}

}  // namespace flash::problem
