// sm90/forward_arguments.h: what the launches that hand out tiles of query rows (forward, dQ by itself) are told alike.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/sm90/forward_work.cuh"
#include "problem/problem.h"

namespace flash::sm90 {

// An end of the interval of keys that a row sees, in 32 bits.
inline int clamp(int64_t end) { return static_cast<int>(std::min<int64_t>(std::max<int64_t>(end, -(1 << 29)), 1 << 29)); }

// lse, sequences, heads, who sees what, and the order of `tiles` tiles, in sections of planes whose K and V fill about section_bytes.
inline void set_row_work(ForwardArguments* a, const problem::Problem& p, int64_t tiles, int64_t section_bytes) {
  a->lse = static_cast<float*>(p.lse);
  a->lse_batch = p.lse_batch;
  a->lse_head = p.lse_head;
  a->cu_seqlens_q = p.cu_seqlens_q;
  a->cu_seqlens_k = p.cu_seqlens_k;
  a->total_rows = static_cast<int>(p.total_rows);
  a->total_keys = static_cast<int>(p.total_keys);
  a->batch = static_cast<int>(p.batch);
  a->heads = common::Divisor(p.heads);
  a->group = common::Divisor(p.heads / p.kv_heads);
  a->rows = static_cast<int>(p.rows);
  a->keys = static_cast<int>(p.keys);
  a->left = clamp(p.left);
  a->right = clamp(p.right);
  a->bottom_right = p.bottom_right;
  a->tiles = static_cast<int>(tiles);
  const int planes = static_cast<int>(p.packed() ? p.heads : p.batch * p.heads), row_tiles = a->tiles / planes;
  a->row_tiles = common::Divisor(row_tiles);
  a->uneven = p.right < problem::kOpen;
  if (a->uneven) {
    const int64_t plane_bytes = p.keys * (p.head_dim + p.value_dim) * 2;
    const int section = static_cast<int>(std::clamp<int64_t>(section_bytes / plane_bytes, 1, planes));
    a->full_sections = planes / section;
    a->section_tiles = common::Divisor(row_tiles * section);
    a->section = common::Divisor(section);
    a->last_section = common::Divisor(std::max(planes % section, 1));
  }
}

}  // namespace flash::sm90
