// problem/problem.h: one attention call as plain numbers and pointers. No torch, no CUDA.
// op/ fills a Problem from tensors; plan.h decides how to run it; cpu/ and cuda/ execute it.
// All strides and offsets count elements and are 64-bit.
#pragma once
#include <cstdint>

namespace flash::problem {

enum class DType : uint8_t { kNone, kBool, kFloat16, kBFloat16, kFloat32, kFloat64 };

constexpr int64_t size_of(DType type) {
  return type == DType::kNone ? 0 : type == DType::kBool ? 1 : type == DType::kFloat32 ? 4 : type == DType::kFloat64 ? 8 : 2;
}

// A [batch, heads, rows, dim] array with a dense last dimension; packed arrays [total, heads, dim] have batch stride 0.
// Strides of dimensions of size 1 and of broadcast dimensions are 0.
struct Array {
  void* data = nullptr;  // may be null where a call does not use it
  int64_t batch = 0, head = 0, row = 0;
};

// attn_mask [batch, heads, rows, keys], broadcast by stride 0. Float masks are added to the scaled score, bool masks select.
struct Mask {
  const void* data = nullptr;  // null: no mask
  DType dtype = DType::kNone;  // kBool, kFloat32, or the dtype of the query
  int64_t batch = 0, head = 0, row = 0, key = 0;
};

// Finite masks below this, such as -FLT_MAX, count as this much and the score beside them is dropped, as it is in an fp32 sum: in log2
// units they would overflow to -inf. Beside a key that is not masked nothing changes. Where all keys of a row are masked so, lse keeps
// the digits that backward and the sum of split keys need.
inline constexpr double kMaskFloor = -1e5;

// An end of the window that is not bounded. Far from overflow when rows and diagonals are added to it.
inline constexpr int64_t kOpen = int64_t{1} << 60;

struct Problem {
  DType dtype = DType::kNone;       // of query, key, value, out
  int64_t batch = 0;                // sequences
  int64_t heads = 0, kv_heads = 0;  // heads % kv_heads == 0; head h reads kv head h / (heads / kv_heads)
  int64_t rows = 0, keys = 0;       // per sequence; packed: the longest sequence
  int64_t head_dim = 0;             // of query and key
  int64_t value_dim = 0;            // of value and out

  Array query;          // [batch, heads, rows, head_dim]
  Array key;            // [batch, kv_heads, keys, head_dim]
  Array value;          // [batch, kv_heads, keys, value_dim]
  Array out;            // [batch, heads, rows, value_dim]
  void* lse = nullptr;  // [batch, heads, rows] natural log, accumulate type; packed: [heads, total]; dense strides below
  int64_t lse_batch = 0, lse_head = 0;

  double scale = 0;                     // multiplies query . key
  bool tf32 = false;                    // fp32 products may be rounded to TF32 (CUDA, torch's allow flag)
  double softcap = 0;                   // 0: off; else score = softcap * tanh(scale * qk / softcap)
  int64_t left = kOpen, right = kOpen;  // row i sees keys [i + diagonal - left, i + diagonal + right]
  bool bottom_right = false;            // diagonal = keys - rows of the sequence, else 0

  Mask mask;
  const void* alibi_slopes = nullptr;  // accumulate type [batch or 1, heads]; score += -slope * |row + diagonal - key|
  int64_t alibi_batch = 0;
  const void* sinks = nullptr;  // accumulate type [heads]: a logit that joins the softmax sum and no output

  double dropout_p = 0;            // probabilities dropped after the softmax; survivors / (1 - p)
  const uint64_t* seed = nullptr;  // two words, in the memory of the device; needed if dropout_p > 0

  const int32_t* cu_seqlens_q = nullptr;   // [batch + 1] in the memory of the device; null: dense
  const int32_t* cu_seqlens_k = nullptr;   // both or neither
  int64_t total_rows = 0, total_keys = 0;  // first dimension of the packed tensors

  bool packed() const { return cu_seqlens_q != nullptr; }
  bool fp64() const { return dtype == DType::kFloat64; }  // accumulate type is double, else float
};

// What backward adds to a Problem whose out and lse are inputs. Null data: not wanted.
struct Gradients {
  Array dout;                  // [batch, heads, rows, value_dim], last dimension dense
  const void* dlse = nullptr;  // accumulate type, laid out as lse; may be null
  Array dquery, dkey, dvalue;  // of the problem's dtype
  void* delta = nullptr;       // accumulate type, laid out as lse: rowsum(dout * out) - dlse, written by backward
  void* dmask = nullptr;       // accumulate type, [mask batch, mask heads, mask rows, mask keys] contiguous, broadcast sizes 1
  int64_t dmask_batch = 0, dmask_head = 0, dmask_row = 0, dmask_key = 0;  // strides, 0 where the mask is broadcast
  bool deterministic = false;
};

}  // namespace flash::problem
