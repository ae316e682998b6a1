// op/decode_check.cpp: what a call of attention_decode or cache_append_ must satisfy.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <utility>

#include "op/check.h"
#include "op/decode.h"

namespace flash::op {
namespace {

void check_on_device(const char* name, const Tensor& t, const Tensor& model, Reasons& reasons) {
  if (t.device() != model.device()) {
    reasons.add(name, " is on ", t.device(), ", k_cache on ", model.device(), ": they must be on one device.");
  }
}

// [B, ...] int32 with dense last dimension.
void check_indices(const char* name, const OptTensor& t, int64_t rank, const c10::SymInt& batch, const CacheInputs& cache,
                   Reasons& reasons) {
  if (!t.has_value()) return;
  if (t->scalar_type() != at::kInt) reasons.add(name, " is ", t->scalar_type(), ": it must be int32.");
  check_on_device(name, *t, cache.key, reasons);
  if (t->dim() != rank || differ(t->sym_size(0), batch)) {
    reasons.add(name, " has the sizes ", t->sym_sizes(), ": it must be ", rank == 1 ? "[B]" : "[B, blocks]", ", B = ", batch,
                ".");
  }
}

// What new keys, or the query, have in common with the cache: batch, heads, head dim.
void check_cache(const CacheInputs& cache, const c10::SymInt& batch, Reasons& reasons) {
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>("k_cache", cache.key), {"v_cache", cache.value}}) {
    if (t.dim() != 4) {
      reasons.add(name, " has ", t.dim(), " dimensions, ", t.sym_sizes(), ": it must be [B or pages, Hk, S or page size, E].");
    } else if (!is_one(t.sym_size(3)) && t.sym_stride(3) != 1) {
      reasons.add(name, " has stride ", t.sym_stride(3), " in its last dimension: it must be 1, a cache is never copied.");
    }
  }
  if (cache.key.dim() != 4 || cache.value.dim() != 4) return;
  for (const int64_t dim : {0, 1, 2}) {
    if (!differ(cache.key.sym_size(dim), cache.value.sym_size(dim))) continue;
    reasons.add("k_cache and v_cache have the sizes ", cache.key.sym_sizes(), " and ", cache.value.sym_sizes(),
                ": all but the last must be equal.");
    break;
  }
  check_indices("cache_seqlens", cache.seqlens, 1, batch, cache, reasons);
  check_indices("block_table", cache.block_table, 2, batch, cache, reasons);
  check_indices("cache_batch_idx", cache.batch_index, 1, batch, cache, reasons);
  check_indices("cache_left_pad", cache.left_pad, 1, batch, cache, reasons);
  if (cache.block_table.has_value()) {
    if (cache.batch_index.has_value()) reasons.add("cache_batch_idx and block_table exclude each other: pass one of them.");
    if (!cache.seqlens.has_value()) reasons.add("block_table needs cache_seqlens, the number of keys of each sequence.");
  } else if (!cache.batch_index.has_value() && differ(cache.key.sym_size(0), batch)) {
    reasons.add("k_cache holds ", cache.key.sym_size(0), " sequences, query ", batch,
                ": they must be equal unless cache_batch_idx or block_table is given.");
  }
}

void check_writable(const char* name, const Tensor& cache, Reasons& reasons) {
  if (at::has_internal_overlap(cache) == at::MemOverlap::Yes) {
    reasons.add(name, " is expanded, so that several of its elements lie in one place: clone() it before it is written to.");
  }
}

void check_operand(const char* name, const Tensor& t, const CacheInputs& cache, Reasons& reasons) {
  if (t.scalar_type() != cache.key.scalar_type()) {
    reasons.add(name, " is ", t.scalar_type(), ", k_cache is ", cache.key.scalar_type(), ": they must be equal.");
  }
  check_on_device(name, t, cache.key, reasons);
  if (t.dim() != 4)
    reasons.add(name, " has ", t.dim(), " dimensions, ", t.sym_sizes(), ": it must be [B, heads, L, head dim].");
}

void check_types(const CacheInputs& cache, Reasons& reasons) {
  const auto type = cache.key.scalar_type();
  if (type != at::kHalf && type != at::kBFloat16 && type != at::kFloat && type != at::kDouble) {
    reasons.add("k_cache is ", type, ": it must be float16, bfloat16, float32 or float64.");
  }
  if (cache.value.scalar_type() != type) {
    reasons.add("v_cache is ", cache.value.scalar_type(), ", k_cache is ", type, ": they must be equal.");
  }
  check_on_device("v_cache", cache.value, cache.key, reasons);
}

}  // namespace

void check_decode(const DecodeInputs& in, const DecodeOptions& options) {
  Reasons reasons;
  check_types(in.cache, reasons);
  check_operand("query", in.query, in.cache, reasons);
  if (in.query.dim() == 4) {
    const auto q = in.query.sym_sizes();
    check_cache(in.cache, q[0], reasons);
    if (in.cache.key.dim() == 4) {
      const auto k = in.cache.key.sym_sizes();
      if (differ(q[3], k[3])) reasons.add("k_cache has head_dim ", k[3], ", query has ", q[3], ": they must be equal.");
      if (!differ(k[1], 0) || differ(q[1] % k[1], 0)) {
        reasons.add("Number of heads in k_cache must divide the number of heads in query, but got ", k[1], " and ", q[1], ".");
      }
    }
    if (in.alibi_slopes.has_value()) {
      const auto s = in.alibi_slopes->sym_sizes();
      check_on_device("alibi_slopes", *in.alibi_slopes, in.cache.key, reasons);
      if (!((s.size() == 1 && !differ(s[0], q[1])) || (s.size() == 2 && !differ(s[1], q[1]) && !differ(s[0], q[0])))) {
        reasons.add("alibi_slopes has the sizes ", s, ": they must be [H] or [B, H].");
      }
    }
    if (in.sinks.has_value()) {
      check_on_device("sinks", *in.sinks, in.cache.key, reasons);
      if (in.sinks->dim() != 1 || differ(in.sinks->sym_size(0), q[1])) {
        reasons.add("sinks has the sizes ", in.sinks->sym_sizes(), ": they must be [H] = [", q[1], "].");
      }
    }
  }
  if (TORCH_GUARD_OR_FALSE(options.appended.sym_lt(0))) {
    reasons.add("appended is ", options.appended, ": it must be at least 0.");
  }
  if (!(options.softcap >= 0.0 && std::isfinite(options.softcap))) {
    reasons.add("softcap is ", options.softcap, ": it must be finite and at least 0 (0 turns it off).");
  }
  if (!reasons.empty()) reasons.raise("flash::attention_decode");
}

void check_append(const AppendInputs& in) {
  Reasons reasons;
  check_types(in.cache, reasons);
  check_operand("k_new", in.key, in.cache, reasons);
  check_operand("v_new", in.value, in.cache, reasons);
  check_writable("k_cache", in.cache.key, reasons);
  check_writable("v_cache", in.cache.value, reasons);
  if (in.key.dim() == 4 && in.value.dim() == 4) {
    check_cache(in.cache, in.key.sym_size(0), reasons);
    const auto fits = [&](const char* name, const Tensor& fresh, const Tensor& cache) {
      if (cache.dim() == 4 && (differ(fresh.sym_size(1), cache.sym_size(1)) || differ(fresh.sym_size(3), cache.sym_size(3)))) {
        reasons.add(name, " has the sizes ", fresh.sym_sizes(), ", its cache ", cache.sym_sizes(),
                    ": heads and head dim must be equal.");
      }
    };
    fits("k_new", in.key, in.cache.key);
    fits("v_new", in.value, in.cache.value);
    if (differ(in.key.sym_size(0), in.value.sym_size(0)) || differ(in.key.sym_size(2), in.value.sym_size(2))) {
      reasons.add("k_new and v_new have the sizes ", in.key.sym_sizes(), " and ", in.value.sym_sizes(),
                  ": all but the last must be equal.");
    }
  }
  if (!reasons.empty()) reasons.raise("flash::cache_append_");
}

}  // namespace flash::op
