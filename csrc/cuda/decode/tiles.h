// decode/tiles.h: the instances of the decode kernels, one row each. Plain C++: the plan and the kernels read the same rows.
#pragma once
#include <cstdint>

namespace flash::decode {

// A CTA takes one contiguous range of keys of one (sequence, kv head, tile of query lanes). A lane is (query row, head of the group).
struct Tile {
  int bucket;  // largest head_dim and value_dim
  int lanes;   // query lanes: 8 per n of the tensor core products
  int warps;   // each walks over chunks of its own until the end
  int keys;    // of a chunk
  int stages;  // chunks under way per warp
  int resident;
  bool bare = false;  // takes one query row without options, over a contiguous cache or one in pages of multiples of 16 keys
  bool once = false;  // and all keys fit into the rings of one cluster of 8, which are filled once

  constexpr bool bare_and_long() const { return bare && !once; }
};

// Measured on an H200, bf16: 4 warps saturate HBM while their arithmetic hides; bytes in flight count, not multiprocessors.
inline constexpr Tile kTiles[] = {
    // Parts are combined by the last CTA to finish, or there is one part only.
    {64, 8, 4, 32, 2, 3},    // 0
    {64, 16, 4, 32, 2, 2},   // 1
    {128, 8, 4, 16, 2, 2},   // 2
    {128, 16, 4, 16, 2, 2},  // 3: as 1 and 2, fits 99 KB per block too (sm_86, sm_89, sm_120)
    {256, 8, 4, 16, 2, 1},   // 4: 129 KB
    // sm_90 only from here on. More CTAs than multiprocessors: 2 % to 4 % faster than 2, and as much slower where each has its own.
    {128, 8, 4, 16, 3, 2},  // 5
    // Clusters push their parts through shared memory: few CTAs, so more bytes under way in each.
    {64, 8, 8, 32, 3, 1},    // 6
    {64, 16, 8, 32, 3, 1},   // 7
    {128, 8, 8, 16, 3, 1},   // 8
    {128, 16, 8, 16, 3, 1},  // 9: 205 KB
    {256, 8, 4, 16, 3, 1},   // 10
    // Long contiguous caches: 2 % faster than 8, which is 2 % faster over pages.
    {128, 8, 8, 16, 2, 1},  // 11
    // One query row without options: latency counts, and with it every line of code, which is fetched from memory to run once. 8 heads, by
    // graph where an empty kernel takes 5 us, beside 8: 1024 keys 9.5 us instead of 10.2 (in pages 10.0 and 10.7; by 13 9.9), 4096 13.2
    // instead of 13.9, 8192 17.7 instead of 18.2 (18.5, 18.9), 16384 27.1 instead of 28.2 (27.1, 27.9). 13 with 3 stages is 0 to 3 % slower,
    // and 12 % at half a GB. Without asking L2 for the first chunk early +0.1 us, for the query +0.05.
    {128, 8, 8, 16, 3, 1, true, true},  // 12
    {128, 8, 8, 16, 2, 1, true},        // 13
};
inline constexpr int kVariants = sizeof(kTiles) / sizeof(Tile);
inline constexpr int kDeep = 5, kFirstHopper = kDeep, kFirstCluster = 6;
inline constexpr int kLongCluster = 11, kBareOnce = 12, kBareCluster = 13;
inline constexpr int kLargestCluster = 8;

constexpr bool clustered(int variant) { return variant >= kFirstCluster; }

// Dynamic shared memory of a CTA: rings of K and V, in which the warps leave their sums at the end; their maxima and totals; a barrier;
// the inbox of a cluster.
constexpr int64_t warp_bytes(const Tile& t) { return int64_t{t.stages} * t.keys * t.bucket * 4; }  // of the ring
constexpr int64_t ring_bytes(const Tile& t) { return t.warps * warp_bytes(t); }
constexpr int64_t state_bytes(const Tile& t) { return int64_t{t.warps} * t.lanes * 8; }
constexpr int64_t inbox_bytes(const Tile& t) { return int64_t{t.lanes} * (t.bucket / 4) * 24; }
constexpr int64_t used_bytes(int variant) {
  const Tile& t = kTiles[variant];
  return ring_bytes(t) + state_bytes(t) + 16 + (clustered(variant) ? inbox_bytes(t) : 0);
}
// So much that no more than `resident` CTAs share a multiprocessor of 228 KB: one more costs up to 5 %.
constexpr int64_t shared_bytes(int variant) {
  const int64_t crowded = 228 * 1024 / (kTiles[variant].resident + 1);
  return used_bytes(variant) > crowded ? used_bytes(variant) : crowded;
}

// Index into kTiles for tickets, -1 if no instance holds the head dims. One of 8 lanes where they suffice.
constexpr int variant_for(int64_t dim, int64_t lanes) {
  if (dim <= 64) return lanes <= 8 ? 0 : 1;
  if (dim <= 128) return lanes <= 8 ? 2 : 3;
  return dim <= 256 ? 4 : -1;
}

}  // namespace flash::decode
