// problem/decode.h: few query rows against a long cache of keys and values: a Problem whose keys lie in a cache, of which only the
// device knows how much is filled. Where the cache is contiguous and full, a Decode is a Problem.
#pragma once
#include "problem/mask.h"
#include "problem/plan.h"
#include "problem/portable.h"
#include "problem/problem.h"

namespace flash::problem {

// Contents of the arrays are cut to what the cache holds, so that bad ones cannot reach outside it.
struct Cache {
  const int32_t* lengths = nullptr;   // [batch] filled keys of a sequence; null: Problem::keys
  int64_t appended = 0;               // keys beyond `lengths`
  const int32_t* left_pad = nullptr;  // [batch] first keys that no row sees; may be null
  const int32_t* block_table =
      nullptr;  // [batch][table_stride] which page holds keys page_size * i and following; null: no pages
  int64_t table_stride = 0, page_size = 0;
  const int32_t* batch_index = nullptr;  // [batch] which entry of an unpaged cache a sequence has; null: its own number
  int64_t entries = 0;                   // pages, or sequences of an unpaged cache
};

// Batch strides of problem.key and problem.value are those of an entry. problem.keys: the most keys a sequence may have.
struct Decode {
  Problem problem;
  Cache cache;
};

// New keys and values, to be copied into a cache behind the cache.lengths + cache.appended that it holds.
struct Append {
  DType dtype = DType::kNone;
  int64_t batch = 0, kv_heads = 0, rows = 0, keys = 0, head_dim = 0, value_dim = 0;
  Array new_key, new_value;  // [batch, kv_heads, rows, dim]
  Array key, value;          // the cache
  Cache cache;
};

FLASH_HD int64_t cut(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Keys of sequence b, of at most `keys`.
FLASH_HD int64_t length_of(const Cache& c, int64_t keys, int64_t b) {
  return c.lengths == nullptr ? keys : cut(c.lengths[b] + c.appended, 0, keys);
}

FLASH_HD int64_t left_pad_of(const Cache& c, int64_t b) {
  return c.left_pad == nullptr || c.left_pad[b] < 0 ? 0 : c.left_pad[b];
}

// The entry that holds `key` of sequence b.
FLASH_HD int64_t entry_of(const Cache& c, int64_t b, int64_t key) {
  const int64_t entry = c.block_table != nullptr   ? c.block_table[b * c.table_stride + key / c.page_size]
                        : c.batch_index != nullptr ? c.batch_index[b]
                                                   : b;
  return cut(entry, 0, c.entries - 1);
}

// Its row there.
FLASH_HD int64_t slot_of(const Cache& c, int64_t key) { return c.block_table != nullptr ? key % c.page_size : key; }

// Which CUDA instance, and how the keys are cut: Family::kDecode, variant -1 for plain arithmetic; kNone where nothing takes the call.
Plan plan_decode(const Decode& decode, const Device& device);

// An ordinary forward call as a Decode: a cache of its own that is full.
Decode as_decode(const Problem& problem);

// Whether the decode kernels are the ones for an ordinary forward call.
bool decode_takes(const Problem& problem, const Device& device);

// The workspace of a plan: fp32 sums of the parts, then their states, then tickets (4 bytes each), in case a stream has none.
struct DecodeWorkspace {
  int64_t sums_bytes = 0, states_bytes = 0, tickets = 0;
  int64_t bytes() const { return sums_bytes + states_bytes + tickets * 4; }
};
DecodeWorkspace decode_workspace(const Decode& decode, const Plan& plan);

}  // namespace flash::problem
