// decode/ring.cuh: a warp's private ring of chunks of K and V in shared memory, filled by cp.async. No other warp touches it.
// A stage is K then V of a chunk, [panel of 64 columns][key][128 bytes], the 16-byte piece xored with the key modulo 8.
#pragma once
#include "cuda/decode/segment.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/decode.cuh"
#include "cuda/ptx/memory.cuh"

namespace flash::decode {

inline constexpr unsigned kWarp = 0xffffffffu;

template <int kVariant>
struct Ring {
  static constexpr Tile kTile = kTiles[kVariant];
  static constexpr int kKeys = kTile.keys, kWarps = kTile.warps;
  static constexpr int kPieces = kTile.bucket / 8, kRows = 32 / kPieces;  // a copy of all lanes brings kRows rows
  static constexpr int kPanel = kKeys * 128, kHalf = kKeys * kTile.bucket * 2, kStage = 2 * kHalf;

  const char *key, *value;          // this lane's piece of row 0 of the sequence, or of entry 0 under a block table
  const char *any_key, *any_value;  // what a copy of 0 bytes points to
  int64_t key_row, value_row;       // bytes
  int64_t key_entry, value_entry;   // bytes, under a block table
  bool has_key, has_value;          // the piece lies inside head_dim, value_dim
  int begin, end, chunk_end;
  uint32_t first, stage;  // shared addresses: of the ring, of the stage that is filled next
  uint64_t policy;        // of L2, 0: its own

  // Block table. Pages of whole chunks: lane i knows where the i-th of the next 32 chunks lies, and of the 32 after them. Other
  // pages: lane i knows where row i of the next chunk lies.
  const int* table;
  int page_size, entries;
  bool whole;
  int entry, slot, coming_entry, coming_slot, used;

  __device__ __forceinline__ Ring(const Arguments& a, const Segment& s, uint32_t shared) {
    const int lane = threadIdx.x & 31, piece = lane % kPieces;
    begin = s.begin, end = s.end, chunk_end = s.chunk_end;
    first = stage = shared + (threadIdx.x >> 5) * (kTile.stages * kStage);
    policy = a.evict_first ? ptx::policy_evict_first() : 0;
    any_key = static_cast<const char*>(a.key), any_value = static_cast<const char*>(a.value);
    key_row = a.key_strides.row * 2, value_row = a.value_strides.row * 2;
    key_entry = a.key_strides.batch * 2, value_entry = a.value_strides.batch * 2;
    has_key = piece * 8 < a.head_dim, has_value = piece * 8 < a.value_dim;
    key = any_key + s.kv_head * a.key_strides.head * 2 + piece * 16;
    value = any_value + s.kv_head * a.value_strides.head * 2 + piece * 16;
    table = a.block_table;
    if (table == nullptr) {
      int sequence = s.batch;
      if (a.batch_index != nullptr) sequence = min(max(__ldg(a.batch_index + s.batch), 0), a.entries - 1);
      key += sequence * key_entry, value += sequence * value_entry;
    } else {
      table += s.batch * a.table_stride;
      page_size = a.page_size, entries = a.entries;
      whole = page_size % kKeys == 0;
      used = 0;
      const int chunk = s.chunk + (threadIdx.x >> 5);
      if (whole) {
        find((chunk + lane * kWarps) * kKeys, &entry, &slot);
        find((chunk + (32 + lane) * kWarps) * kKeys, &coming_entry, &coming_slot);
      } else {
        find(chunk * kKeys + lane % kKeys, &entry, &slot);
      }
    }
    if (kPieces * 8 != a.head_dim) clear_tails(a.head_dim);
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

  __device__ __forceinline__ void find(int at, int* entry, int* slot) const {
    const bool inside = at < end && at < chunk_end * kKeys;
    const int page = inside ? static_cast<int>(static_cast<unsigned>(at) / static_cast<unsigned>(page_size)) : 0;
    *slot = inside ? at - page * page_size : 0;
    *entry = inside ? min(max(__ldg(table + page), 0), entries - 1) : 0;
  }

  static __device__ __forceinline__ uint32_t place(uint32_t half, int row, int piece) {
    return half + (piece >> 3) * kPanel + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
  }

  // Starts the copies of a chunk, if this CTA has it, as one group.
  __device__ __forceinline__ void issue(int chunk) {
    if (chunk < chunk_end) {
      const int at = chunk * kKeys;
      const bool inside = at >= begin && at + kKeys <= end;
      if (table == nullptr) {
        inside ? copy(key + at * key_row, value + at * value_row) : copy_rows(chunk, false);
      } else if (whole) {
        const int page = __shfl_sync(kWarp, entry, used & 31), row = __shfl_sync(kWarp, slot, used & 31);
        if (inside) {
          copy(key + page * key_entry + row * key_row, value + page * value_entry + row * value_row);
        } else {
          copy_rows(chunk, true);
        }
        if ((++used & 31) == 0) {
          entry = coming_entry, slot = coming_slot;
          find((chunk + (33 + (threadIdx.x & 31)) * kWarps) * kKeys, &coming_entry, &coming_slot);
        }
      } else {
        copy_rows(chunk, true);
        find((chunk + kWarps) * kKeys + (threadIdx.x & 31) % kKeys, &entry, &slot);
      }
    }
    ptx::commit_copies();
    stage += kStage;
    if (stage == first + kTile.stages * kStage) stage = first;
  }

 private:
  // A whole chunk whose rows lie one key_row (value_row) apart.
  __device__ __forceinline__ void copy(const char* from_key, const char* from_value) const {
    const int row = (threadIdx.x & 31) / kPieces, piece = (threadIdx.x & 31) % kPieces;
    from_key += row * key_row, from_value += row * value_row;
    const auto all = [&](auto one, const char* from, int64_t step, uint32_t half) {
#pragma unroll
      for (int n = 0; n < kKeys / kRows; ++n, from += step) one(place(half, row + n * kRows, piece), from);
    };
    if (policy == 0) {
      const auto one = [](uint32_t to, const char* from) { ptx::copy_16(to, from); };
      if (has_key) all(one, from_key, key_row * kRows, stage);
      if (has_value) all(one, from_value, value_row * kRows, stage + kHalf);
    } else {
      const auto one = [&](uint32_t to, const char* from) { ptx::copy_16_hinted(to, from, policy); };
      if (has_key) all(one, from_key, key_row * kRows, stage);
      if (has_value) all(one, from_value, value_row * kRows, stage + kHalf);
    }
  }

  // Row by row: rows that no query row sees become zeros (0 * NaN), pages may end anywhere.
  __device__ __forceinline__ void copy_rows(int chunk, bool paged) const {
    const int lane = threadIdx.x & 31, piece = lane % kPieces;
#pragma unroll 1
    for (int n = 0; n < kKeys; n += kRows) {
      const int row = n + lane / kPieces, at = chunk * kKeys + row;
      int64_t page = 0, where = at;
      if (paged) {
        const int source = whole ? used & 31 : row;
        page = __shfl_sync(kWarp, entry, source);
        where = __shfl_sync(kWarp, slot, source) + (whole ? row : 0);
      }
      const bool in = at >= begin && at < end;
      ptx::copy_16(place(stage, row, piece), in && has_key ? key + page * key_entry + where * key_row : any_key,
                   in && has_key ? 16 : 0);
      ptx::copy_16(place(stage + kHalf, row, piece),
                   in && has_value ? value + page * value_entry + where * value_row : any_value, in && has_value ? 16 : 0);
    }
  }
};

}  // namespace flash::decode
