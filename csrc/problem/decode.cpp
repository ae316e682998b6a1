// problem/decode.cpp: how attention of few query rows over a long cache is cut into CTAs. What counts is bytes under way: parts of the
// keys are as many as fill the memory system and no more, since every part costs a start and an end.
#include "problem/decode.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "cuda/decode/tiles.h"
#include "cuda/tiles.h"
#include "problem/describe.h"

namespace flash::problem {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_half(DType type) { return type == DType::kFloat16 || type == DType::kBFloat16; }

bool aligned(const Array& a, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(a.data) | static_cast<uint64_t>((a.batch | a.head | a.row) * 2)) % bytes == 0;
}

int64_t lanes_of(const Problem& p) { return p.rows * (p.heads / p.kv_heads); }

// Kernels count keys, lanes and pages in 32 bits and divide lanes by a reciprocal.
bool fits_32_bits(const Decode& d) {
  constexpr int64_t kLimit = int64_t{1} << 28;
  const Problem& p = d.problem;
  const int64_t group = p.heads / p.kv_heads;
  return p.keys < kLimit && p.rows < kLimit && group < kLimit && lanes_of(p) < kLimit && lanes_of(p) * group < 8 * kLimit &&
         d.cache.entries < kLimit && d.cache.page_size < kLimit && d.cache.appended < kLimit && p.batch < kLimit;
}

// Row of kTiles for tickets, -1 if only plain arithmetic takes the call.
int variant_of(const Decode& d, const Device& device) {
  const Problem& p = d.problem;
  if (!is_half(p.dtype) || p.head_dim % 8 != 0 || p.value_dim % 8 != 0 || !fits_32_bits(d)) return -1;
  if (!aligned(p.key, 16) || !aligned(p.value, 16) || !aligned(p.query, 4) || !aligned(p.out, 8)) return -1;
  const int variant = decode::variant_for(std::max(p.head_dim, p.value_dim), lanes_of(p));
  return variant >= 0 && decode::shared_bytes(variant) > device.shared_memory ? -1 : variant;
}

// The most chunks of `unit` keys that hold a key which some row sees.
int64_t visible_chunks(const Decode& d, int64_t unit) {
  const Problem& p = d.problem;
  const Span span = interval(p, p.rows, p.keys).rows(0, p.rows);
  if (span.last <= span.first) return 1;
  if (d.cache.lengths == nullptr || span.first == 0) return ceil_div(span.last, unit) - span.first / unit;
  return ceil_div(span.last - span.first - 1, unit) + 1;  // the window may begin anywhere in a chunk
}

int64_t cache_bytes(const Decode& d) {
  const Problem& p = d.problem;
  return p.batch * p.kv_heads * p.keys * (p.head_dim + p.value_dim) * size_of(p.dtype);
}

// Evicting keys first gains up to 10 % while other work's dirty lines fill L2, and costs 5 % where the cache is much larger. Measured.
bool evicts_first(const Decode& d) {
  const int64_t bytes = cache_bytes(d);
  return bytes >= 16'000'000 && bytes <= 200'000'000;
}

// Whether bare tiles take the call.
bool is_bare(const Decode& d) {
  const Problem& p = d.problem;
  const Cache& c = d.cache;
  const bool sees_all = p.left >= p.keys && p.right >= (p.bottom_right ? 0 : p.keys);
  const bool options =
      p.softcap > 0 || p.alibi_slopes != nullptr || p.sinks != nullptr || c.left_pad != nullptr || c.batch_index != nullptr;
  const int dim = decode::kTiles[decode::kBareCluster].bucket;
  return p.rows == 1 && sees_all && !options && (c.block_table == nullptr || c.page_size % 16 == 0) && p.head_dim == dim &&
         p.value_dim == dim;
}

// The tile for clusters in place of one for tickets.
int cluster_variant(int variant, const Decode& d, int cluster) {
  if (variant == 2 && cluster >= decode::kLargestCluster / 2 && is_bare(d)) return decode::kBareCluster;
  const bool is_long = variant == 2 && d.cache.block_table == nullptr && cache_bytes(d) > 300'000'000;
  return is_long ? decode::kLongCluster : variant + decode::kFirstCluster;
}

// Clusters of 8 where few (sequence, kv head) pairs leave most of the GPU idle, several per pair where even they do. At most 14 of
// them are resident at the same time with one CTA per multiprocessor.
void choose_cluster(Plan& plan, const Decode& d, int64_t planes, int64_t chunks) {
  plan.cluster = planes < 16 ? decode::kLargestCluster : decode::kLargestCluster / 2;
  while (plan.cluster > 1 && plan.cluster > chunks) plan.cluster /= 2;
  if (plan.cluster == 1) return;
  plan.variant = cluster_variant(plan.variant, d, plan.cluster);
  const int64_t most = planes < 8 ? std::min<int64_t>(8, 14 / planes) : 1;
  const int64_t useful = chunks / (int64_t{plan.cluster} * decode::kTiles[plan.variant].warps);
  plan.splits = plan.cluster * static_cast<int>(std::clamp<int64_t>(useful, 1, std::max<int64_t>(most, 1)));
  const decode::Tile& once = decode::kTiles[decode::kBareOnce];
  if (plan.variant == decode::kBareCluster && plan.splits == decode::kLargestCluster && plan.cluster == plan.splits &&
      !evicts_first(d) && chunks <= int64_t{plan.splits} * once.warps * once.stages)
    plan.variant = decode::kBareOnce;
}

void choose_parts(Plan& plan, const Decode& d, const Device& device, int64_t planes, int64_t chunks) {
  const decode::Tile& tile = decode::kTiles[plan.variant];
  const int64_t multiprocessors = device.multiprocessors, keys = chunks * tile.keys;
  // A GPU cut down by MIG or MPS may have no room for a cluster (CUDA C++ Programming Guide, thread block clusters).
  if (device.sm90 && planes <= 16 && multiprocessors >= 2 * decode::kLargestCluster) {
    choose_cluster(plan, d, planes, chunks);
    if (plan.cluster > 1) return;
  }
  if (d.cache.lengths != nullptr && planes > 16) {  // units balance sequences of unequal lengths
    // Shorter ones where few planes have few keys, but not shorter than it takes for two CTAs a multiprocessor.
    const int64_t few = planes * ceil_div(keys, 2048) < 2 * multiprocessors ? 1024 : 2048;
    const int64_t unit = (keys <= 16384 && planes * 4 < multiprocessors * 3 ? few : 4096) / tile.keys;
    plan.splits = static_cast<int>(ceil_div(chunks, unit));
    if (plan.splits > 1) plan.unit = static_cast<int>(unit);
  } else if (planes * 4 < multiprocessors * 3) {
    const int64_t useful = ceil_div(chunks, tile.warps);
    plan.splits = static_cast<int>(std::clamp<int64_t>(multiprocessors / planes, 1, useful));
  }
  if (device.sm90 && plan.variant == 2 && planes * plan.splits > multiprocessors) plan.variant = decode::kDeep;
}

}  // namespace

Decode as_decode(const Problem& p) {
  Decode d{p, {}};
  d.cache.entries = p.batch;
  return d;
}

Plan plan_decode(const Decode& d, const Device& device) {
  const Problem& p = d.problem;
  Plan plan;
  plan.family = Family::kDecode;
  plan.variant = variant_of(d, device);
  plan.load_bytes = plan.store_bytes = plan.variant < 0 ? static_cast<int>(size_of(p.dtype)) : 16;
  const auto refuse = [&](Refusal reason) {
    plan.family = Family::kNone;
    plan.refused = reason;
    return plan;
  };
  if (device.major < 8) return refuse(kRefusedArchitecture);
  if (plan.variant < 0) {
    if (cuda::bucket(p.head_dim, p.value_dim) == 0) return refuse(kRefusedHeadDim);
    plan.tile_rows = plan.tile_keys = 1;
    plan.blocks = p.batch * p.heads * p.rows;
    return plan.blocks > 2147483647 ? refuse(kRefusedGrid) : plan;
  }
  const decode::Tile tile = decode::kTiles[plan.variant];
  plan.head_dim = tile.bucket;
  plan.tile_rows = tile.lanes;
  plan.tile_keys = tile.keys;
  const int64_t planes = p.batch * p.kv_heads * ceil_div(lanes_of(p), tile.lanes);
  const int64_t chunks = visible_chunks(d, tile.keys);
  choose_parts(plan, d, device, planes, chunks);
  plan.blocks = planes * plan.splits;
  plan.evict_first = evicts_first(d);
  plan.workspace_bytes = decode_workspace(d, plan).bytes();
  return plan;
}

bool decode_takes(const Problem& p, const Device& device) {
  if (!device.cuda || device.major < 8 || p.packed() || p.mask.data != nullptr || p.dropout_p > 0) return false;
  const int64_t lanes = lanes_of(p);
  return lanes <= 16 && (lanes <= 8 || p.keys >= 128) && variant_of(as_decode(p), device) >= 0;
}

DecodeWorkspace decode_workspace(const Decode& d, const Plan& plan) {
  const int64_t parts = plan.splits / plan.cluster;
  if (plan.variant < 0 || parts <= 1) return {};
  const decode::Tile& tile = decode::kTiles[plan.variant];
  const int64_t planes = d.problem.batch * d.problem.kv_heads * ceil_div(lanes_of(d.problem), tile.lanes);
  const int64_t items = planes * parts * tile.lanes;
  // Clusters keep a state for every 4 columns, tickets one for a lane.
  return {items * tile.bucket * 4, items * 8 * (plan.cluster > 1 ? tile.bucket / 4 : 1), planes * plan.cluster};
}

std::string describe_decode(const Decode& d, const Device& device, const Plan& plan) {
  if (plan.family != Family::kDecode) return describe(d.problem, nullptr, device, plan);
  char text[800];
  if (plan.variant < 0) {
    std::snprintf(
        text, sizeof text,
        "The forward pass runs the decode kernel for any type and stride: plain arithmetic, right but slow. The tensor "
        "core instances take float16 and bfloat16, head dims up to 256 that are multiples of 8, and rows of keys and "
        "values that are aligned to 16 bytes.\nThe workspace has 0 bytes.");
    return text;
  }
  int used = std::snprintf(
      text, sizeof text,
      "The forward pass runs the decode kernels: the instance for head dims up to %d and %d query rows "
      "(of all heads that share keys).\nA block reads one range of keys in steps of %d per warp (variant %d).\n"
      "%lld blocks run on %d multiprocessors.\n",
      plan.head_dim, plan.tile_rows, plan.tile_keys, plan.variant, static_cast<long long>(plan.blocks), device.multiprocessors);
  const size_t room = sizeof text - static_cast<size_t>(used);
  char* rest = text + used;
  if (plan.cluster > 1) {
    std::snprintf(rest, room,
                  "The keys are split into %d parts; clusters of %d blocks add theirs up in shared memory.\nThe workspace has "
                  "%lld bytes.",
                  plan.splits, plan.cluster, static_cast<long long>(plan.workspace_bytes));
  } else if (plan.unit > 0) {
    std::snprintf(
        rest, room,
        "The keys are split into parts of %d, at most %d; the last block of a sequence adds them up.\nThe workspace has "
        "%lld bytes.",
        plan.unit * plan.tile_keys, plan.splits, static_cast<long long>(plan.workspace_bytes));
  } else if (plan.splits > 1) {
    std::snprintf(rest, room, "The keys are split into %d parts; the last block adds them up.\nThe workspace has %lld bytes.",
                  plan.splits, static_cast<long long>(plan.workspace_bytes));
  } else {
    std::snprintf(rest, room, "The keys are not split.\nThe workspace has 0 bytes.");
  }
  return text;
}

}  // namespace flash::problem
