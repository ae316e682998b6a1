// decode/ring.cuh: a warp's private ring of chunks of K and V in shared memory, filled by cp.async. No other warp touches it.
// A stage is K then V of a chunk, [panel of 64 columns][key][128 bytes], the 16-byte piece xored with the key modulo 8.
#pragma once
#include "cuda/decode/segment.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/decode.cuh"
#include "cuda/ptx/memory.cuh"

namespace flash::decode {

inline constexpr unsigned kWarp = 0xffffffffu;
inline constexpr int kRun = 16;  // keys that lie one row apart in pages of multiples of 16

template <int kVariant>
struct Ring {
  static constexpr Tile kTile = kTiles[kVariant];
  static constexpr int kKeys = kTile.keys, kWarps = kTile.warps, kRuns = kKeys / kRun;
  static constexpr int kPieces = kTile.bucket / 8, kRows = 32 / kPieces;  // a copy of all lanes brings kRows rows
  static constexpr int kAhead = kTile.bare ? 16 : 32;  // runs; how early the next 32 are looked up (32: before the first copy)
  static constexpr bool kHints = kTile.bare_and_long();  // every copy has a policy: code for one kind of copies
  static constexpr int kPanel = kKeys * 128, kHalf = kKeys * kTile.bucket * 2, kStage = 2 * kHalf;

  const char *key, *value;          // this lane's piece of its first row of the sequence, or of entry 0 under a block table
  const char *any_key, *any_value;  // what a copy of 0 bytes points to
  int64_t key_row, value_row;       // bytes
  int64_t key_entry, value_entry;   // bytes, under a block table
  bool has_key, has_value;          // the piece lies inside head_dim, value_dim
  int begin, end, chunk_end;
  uint32_t first, stage;  // shared addresses: of the ring, of the stage that is filled next
  uint64_t policy;        // of L2; 0: its own
  const char *next_key[kRuns],
      *next_value[kRuns];  // the runs of the chunk that is fetched next: known before its stage is free

  // Block table. Pages of whole runs: lane i knows where the i-th of the next 32 runs lies, and of the 32 after them. Other pages:
  // lane i knows where row i of the next chunk lies. Entries are cut to the cache where they are used and not where they are read: that
  // would wait for them.
  const int* table;
  int page_size, last_entry;
  common::Divisor by_page;
  bool whole;
  int entry, slot, coming_entry, coming_slot, used;

  __device__ __forceinline__ Ring(const Arguments& a, const Segment& s, uint32_t shared) {
    const int lane = threadIdx.x & 31, piece = lane % kPieces, row = lane / kPieces;
    const int chunk = s.chunk + (threadIdx.x >> 5);
    begin = s.begin, end = s.end, chunk_end = s.chunk_end;
    first = stage = shared + (threadIdx.x >> 5) * (kTile.stages * kStage);
    policy = a.evict_first ? ptx::policy_evict_first() : kHints ? ptx::policy_evict_normal() : 0;
    any_key = static_cast<const char*>(a.key), any_value = static_cast<const char*>(a.value);
    key_row = a.key_strides.row * 2, value_row = a.value_strides.row * 2;
    key_entry = a.key_strides.batch * 2, value_entry = a.value_strides.batch * 2;
    has_key = piece * 8 < a.head_dim, has_value = piece * 8 < a.value_dim;
    key = any_key + s.kv_head * a.key_strides.head * 2 + piece * 16 + row * key_row;
    value = any_value + s.kv_head * a.value_strides.head * 2 + piece * 16 + row * value_row;
    table = a.block_table;
    if (table == nullptr) {
      int sequence = s.batch;
      if (a.batch_index != nullptr) sequence = min(max(__ldg(a.batch_index + s.batch), 0), a.entries - 1);
      key += sequence * key_entry, value += sequence * value_entry;
    } else {
      table += s.batch * a.table_stride;
      page_size = a.page_size, last_entry = a.entries - 1, by_page = a.by_page;
      whole = kTile.bare || page_size % kRun == 0;
      used = 0;
      if (whole) {
        find(key_of_run(chunk, lane), &entry, &slot);
        if (kAhead == 32) find(key_of_run(chunk, 32 + lane), &coming_entry, &coming_slot);
      } else {
        find(chunk * kKeys + lane % kKeys, &entry, &slot);
      }
    }
    locate(chunk);
    if (table == nullptr || whole) prefetch(chunk, a);
    if (kPieces * 8 != a.head_dim) clear_tails(a.head_dim);
  }

  // Asks for the first lines of a block table while the length is being read, on which it depends what is needed of them.
  static __device__ __forceinline__ void prefetch_table(const Arguments& a, int batch) {
    if (a.block_table == nullptr || threadIdx.x >= 32) return;
    const int first = threadIdx.x * 32;  // entries of a line
    if (first * static_cast<int64_t>(a.page_size) < a.capacity)
      ptx::prefetch_l1(a.block_table + batch * a.table_stride + first);
  }

  // Starts the copies of a chunk, if this CTA has it: those of K first, where its half of the stage is free before the other. Chunks
  // come in their order, each is one group.
  __device__ __forceinline__ void issue_keys(int chunk) const {
    if (is_whole(chunk)) copy(has_key, next_key, key_row * kRows, stage);
  }
  __device__ __forceinline__ void issue_values(int chunk) {
    if (chunk < chunk_end) {
      if (is_whole(chunk)) {
        copy(has_value, next_value, value_row * kRows, stage + kHalf);
      } else {
        copy_rows(chunk);  // K as well
      }
      if (table != nullptr && !whole) find((chunk + kWarps) * kKeys + (threadIdx.x & 31) % kKeys, &entry, &slot);
      locate(chunk + kWarps);
    }
    advance();
  }
  __device__ __forceinline__ void advance() {
    ptx::commit_copies();
    stage += kStage;
    if (stage == first + kTile.stages * kStage) stage = first;
  }

 private:
  // The first key of the i-th run from `chunk` on that this warp fetches.
  static __device__ __forceinline__ int key_of_run(int chunk, int i) {
    return (chunk + i / kRuns * kWarps) * kKeys + i % kRuns * kRun;
  }

  // Where a key lies. Keys that this CTA does not fetch lie anywhere.
  __device__ __forceinline__ void find(int at, int* entry, int* slot) const {
    const bool inside = at < end && at < chunk_end * kKeys;
    const int page = inside ? static_cast<int>(by_page.divide(static_cast<uint32_t>(at))) : 0;
    *slot = inside ? at - page * page_size : 0;
    *entry = inside ? __ldg(table + page) : 0;
  }

  // What lane `from` found, within the cache.
  __device__ __forceinline__ int entry_of(int from) const { return min(max(__shfl_sync(kWarp, entry, from), 0), last_entry); }

  // Sets next_key and next_value.
  __device__ __forceinline__ void locate(int chunk) {
    if (chunk >= chunk_end) return;
    if (table == nullptr) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        next_key[run] = key + (chunk * kKeys + run * kRun) * key_row;
        next_value[run] = value + (chunk * kKeys + run * kRun) * value_row;
      }
    } else if (whole) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int page = entry_of(used & 31), row = __shfl_sync(kWarp, slot, used & 31);
        next_key[run] = key + page * key_entry + row * key_row;
        next_value[run] = value + page * value_entry + row * value_row;
        ++used;
      }
      if ((used & 31) == 0) entry = coming_entry, slot = coming_slot;
      if (((used + kAhead) & 31) == 0)
        find(key_of_run(chunk + kWarps, kAhead + (threadIdx.x & 31)), &coming_entry, &coming_slot);
    }
  }

  // Asks for the lines of the chunk that is fetched next, whose copies take their time to be issued. Only worth it for the first one.
  __device__ __forceinline__ void prefetch(int chunk, const Arguments& a) const {
    constexpr int kLines = kTile.bucket / 64, kStep = 32 / kLines;  // lines of a row; rows per instruction
    const int lane = threadIdx.x & 31, line = lane % kLines, mine = lane / kPieces;
#pragma unroll
    for (int n = 0; n < kKeys; n += kStep) {
      const int row = n + lane / kLines, at = chunk * kKeys + row;
      const bool second = kRuns > 1 && row >= kRun;
      const int64_t down = row % kRun - mine, right = line * 128 - lane % kPieces * 16;
      if (chunk >= chunk_end || at < begin || at >= end) continue;
      if (line * 64 < a.head_dim) ptx::prefetch_l2((second ? next_key[kRuns - 1] : next_key[0]) + down * key_row + right);
      if (line * 64 < a.value_dim)
        ptx::prefetch_l2((second ? next_value[kRuns - 1] : next_value[0]) + down * value_row + right);
    }
  }

  // Columns of K past head_dim meet zeros of Q: they must be finite.
  __device__ __forceinline__ void clear_tails(int head_dim) const {
    const int tail = kPieces - head_dim / 8;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < kTile.stages * kKeys * tail; i += 32) {
      const int row = i / tail, piece = head_dim / 8 + i % tail;
      ptx::store_shared(place(first + row / kKeys * kStage, row % kKeys, piece), uint4{});
    }
  }

  static __device__ __forceinline__ uint32_t place(uint32_t half, int row, int piece) {
    return half + (piece >> 3) * kPanel + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
  }

  // All keys of a chunk of this CTA are seen, in runs that lie one row apart.
  __device__ __forceinline__ bool is_whole(int chunk) const {
    const int at = chunk * kKeys;
    return chunk < chunk_end && at >= begin && at + kKeys <= end && (table == nullptr || whole);
  }

  // K or V of a whole chunk, run by run.
  __device__ __forceinline__ void copy(bool has, const char* const (&from)[kRuns], int64_t step, uint32_t half) const {
    const int row = (threadIdx.x & 31) / kPieces, piece = (threadIdx.x & 31) % kPieces;
    const auto all = [&](auto one) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const char* source = from[run];
#pragma unroll
        for (int n = 0; n < kRun / kRows; ++n, source += step) one(place(half, run * kRun + row + n * kRows, piece), source);
      }
    };
    if (!has) return;
    if (!kHints && policy == 0) {
      all([](uint32_t to, const char* source) { ptx::copy_16(to, source); });
    } else {
      all([&](uint32_t to, const char* source) { ptx::copy_16_hinted(to, source, policy); });
    }
  }

  // Row by row: rows that no query row sees become zeros (0 * NaN), pages may end anywhere.
  __device__ __forceinline__ void copy_rows(int chunk) const {
    const int lane = threadIdx.x & 31, piece = lane % kPieces, first_row = lane / kPieces;
#pragma unroll 1
    for (int n = 0; n < kKeys; n += kRows) {
      const int row = n + first_row, at = chunk * kKeys + row;
      const char *from_key, *from_value;
      if (table != nullptr && !whole) {
        const int page = entry_of(row), where = __shfl_sync(kWarp, slot, row) - first_row;
        from_key = key + page * key_entry + where * key_row;
        from_value = value + page * value_entry + where * value_row;
      } else {
        const bool second = kRuns > 1 && n >= kRun;
        from_key = (second ? next_key[kRuns - 1] : next_key[0]) + n % kRun * key_row;
        from_value = (second ? next_value[kRuns - 1] : next_value[0]) + n % kRun * value_row;
      }
      const bool in = at >= begin && at < end;
      ptx::copy_16(place(stage, row, piece), in && has_key ? from_key : any_key, in && has_key ? 16 : 0);
      ptx::copy_16(place(stage + kHalf, row, piece), in && has_value ? from_value : any_value, in && has_value ? 16 : 0);
    }
  }
};

}  // namespace flash::decode
