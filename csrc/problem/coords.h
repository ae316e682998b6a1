// problem/coords.h: where a sequence and a head lie in memory, dense or packed, with grouped kv heads.
#pragma once
#include "problem/portable.h"
#include "problem/problem.h"

namespace flash::problem {

// One sequence of the batch: its first row in packed arrays (0 when dense) and its lengths.
struct Sequence {
  int64_t batch;       // index into batch strides; packed arrays have batch stride 0
  int64_t row, key;    // first row and key
  int64_t rows, keys;  // lengths
};

// Lengths come from the caller's memory: they are cut to what the arrays hold, so bad content cannot reach outside them.
FLASH_HD Sequence sequence(const Problem& p, int64_t b) {
  if (p.cu_seqlens_q == nullptr) return {b, 0, 0, p.rows, p.keys};
  const auto cut = [](int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; };
  const int64_t row = cut(p.cu_seqlens_q[b], 0, p.total_rows), row_end = cut(p.cu_seqlens_q[b + 1], row, p.total_rows);
  const int64_t key = cut(p.cu_seqlens_k[b], 0, p.total_keys), key_end = cut(p.cu_seqlens_k[b + 1], key, p.total_keys);
  return {b, row, key, row_end - row < p.rows ? row_end - row : p.rows, key_end - key < p.keys ? key_end - key : p.keys};
}

FLASH_HD int64_t kv_head(const Problem& p, int64_t head) { return head / (p.heads / p.kv_heads); }

// Element offset of a row of one head; `row` is absolute in packed arrays.
FLASH_HD int64_t offset(const Array& a, int64_t batch, int64_t head, int64_t row) {
  return batch * a.batch + head * a.head + row * a.row;
}

FLASH_HD int64_t lse_offset(const Problem& p, int64_t batch, int64_t head, int64_t row) {
  return batch * p.lse_batch + head * p.lse_head + row;
}

}  // namespace flash::problem
