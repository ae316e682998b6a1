// op/decode.cpp: attention_decode and cache_append_: what a call must satisfy, tensors -> Decode, and the keys that no device has.
#include "op/decode.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "op/backend.h"
#include "op/check.h"
#include "op/layout.h"
#include "op/rows_first.h"

namespace flash::op {
namespace {

using problem::Cache;

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

const int32_t* pointer(const OptTensor& t) { return t.has_value() ? t->const_data_ptr<int32_t>() : nullptr; }

OptTensor contiguous(const OptTensor& t) { return t.has_value() ? OptTensor(t->contiguous()) : std::nullopt; }

// The index tensors of a cache as kernels read them; owns them.
struct Indices {
  OptTensor seqlens, block_table, batch_index, left_pad;

  explicit Indices(const CacheInputs& in)
      : seqlens(contiguous(in.seqlens)),
        block_table(contiguous(in.block_table)),
        batch_index(contiguous(in.batch_index)),
        left_pad(contiguous(in.left_pad)) {}

  Cache cache(const CacheInputs& in, int64_t appended) const {
    Cache c;
    c.lengths = pointer(seqlens);
    c.appended = appended;
    c.left_pad = pointer(left_pad);
    c.block_table = pointer(block_table);
    if (block_table.has_value()) {
      c.table_stride = block_table->size(1);
      c.page_size = in.key.size(2);
    }
    c.batch_index = pointer(batch_index);
    c.entries = in.key.size(0);
    return c;
  }
};

// The most keys that a sequence can have.
int64_t capacity(const CacheInputs& in) { return in.key.size(2) * (in.block_table.has_value() ? in.block_table->size(1) : 1); }

int64_t window_end(const OptSymInt& end) {
  return end.has_value() ? std::clamp(end->guard_int(__FILE__, __LINE__), -problem::kOpen, problem::kOpen) : problem::kOpen;
}

// swapped() for kernels, below autograd. Not through the dispatcher, which would cost the host a microsecond each.
Tensor swapped_directly(const Tensor& t) {
  if (t.dim() != 4) return t;
  Tensor view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  const auto sizes = t.sizes(), strides = t.strides();
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(std::array{sizes[0], sizes[2], sizes[1], sizes[3]},
                              std::array{strides[0], strides[2], strides[1], strides[3]});
  return view;
}

// kernel(inputs with heads first) under inputs that have rows first.
template <class Swap, class Kernel>
OutLse decode_rows_first(const DecodeInputs& in, DecodeOptions options, const Swap& swap, const Kernel& kernel) {
  options.rows_first = false;
  const Tensor query = swap(in.query), key = swap(in.cache.key), value = swap(in.cache.value);
  const CacheInputs cache{key, value, in.cache.seqlens, in.cache.block_table, in.cache.batch_index, in.cache.left_pad};
  auto [out, lse] = kernel(DecodeInputs{query, cache, in.alibi_slopes, in.sinks}, options);
  return {swap(out), std::move(lse)};
}

template <class Swap, class Kernel>
void append_rows_first(const AppendInputs& in, const Swap& swap, const Kernel& kernel) {
  const Tensor key = swap(in.cache.key), value = swap(in.cache.value), new_key = swap(in.key), new_value = swap(in.value);
  kernel(AppendInputs{
      {key, value, in.cache.seqlens, in.cache.block_table, in.cache.batch_index, in.cache.left_pad}, new_key, new_value});
}

OutLse meta(const DecodeInputs& in, const DecodeOptions& options) {
  if (options.rows_first) return decode_rows_first(in, options, swapped, meta);
  check_decode(in, options);
  const auto q = in.query.sym_sizes();
  c10::SymDimVector out(q.begin(), q.end());
  out.back() = in.cache.value.sym_size(3);
  return {empty_in_order(in.query, out, in.query.options()),
          at::empty_symint({q[0], q[1], q[2]}, in.query.options().dtype(accumulate_type(in.query)))};
}

void meta_append(const AppendInputs& in) {
  if (in.rows_first) return append_rows_first(in, swapped, meta_append);
  check_append(in);
}

}  // namespace

OutLse call_decode(const DecodeInputs& in, const DecodeOptions& o) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash::attention_decode", "").typed<decltype(flat_decode<nullptr>)>();
  const CacheInputs& c = in.cache;
  return op.call(in.query, c.key, c.value, c.seqlens, c.block_table, c.batch_index, c.left_pad, in.alibi_slopes, in.sinks,
                 o.appended, o.window_left, o.window_right, o.bottom_right, o.scale, o.softcap, o.rows_first);
}

void call_append(const AppendInputs& in) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash::cache_append_", "").typed<decltype(flat_append<nullptr>)>();
  const CacheInputs& c = in.cache;
  op.call(c.key, c.value, in.key, in.value, *c.seqlens, c.block_table, c.batch_index, in.rows_first);
}

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

OutLse decode(const Backend& backend, const DecodeInputs& in, const DecodeOptions& options) {
  if (options.rows_first) {
    return decode_rows_first(in, options, swapped_directly,
                             [&](const DecodeInputs& i, const DecodeOptions& o) { return decode(backend, i, o); });
  }
  check_decode(in, options);
  auto sizes = in.query.sizes().vec();
  sizes.back() = in.cache.value.size(3);
  Tensor out = empty_in_order(in.query, sizes, in.query.options());
  Tensor lse = at::empty({sizes[0], sizes[1], sizes[2]}, in.query.options().dtype(accumulate_type(in.query)));
  const int64_t keys = capacity(in.cache);
  if (keys == 0 || in.cache.key.size(0) == 0 || in.query.numel() == 0 || sizes.back() == 0) {
    out.zero_();
    TORCH_CHECK(keys == 0 || in.query.size(3) > 0 || lse.numel() == 0,
                "flash::attention_decode: query has head_dim 0: it must be at least 1.");
    if (in.sinks.has_value() && lse.numel() > 0) {
      lse.copy_(in.sinks->to(lse.scalar_type()).view({1, -1, 1}).expand_as(lse));
    } else {
      lse.fill_(-std::numeric_limits<double>::infinity());
    }
    return {std::move(out), std::move(lse)};
  }
  const Tensor query = in.query.stride(3) == 1 || in.query.size(3) == 1 ? in.query : in.query.contiguous();
  const Indices indices(in.cache);
  problem::Decode d;
  d.cache = indices.cache(in.cache, options.appended.guard_int(__FILE__, __LINE__));
  problem::Problem& p = d.problem;
  p.dtype = dtype_of(query);
  p.batch = sizes[0];
  p.heads = sizes[1];
  p.kv_heads = in.cache.key.size(1);
  p.rows = sizes[2];
  p.keys = keys;
  p.head_dim = query.size(3);
  p.value_dim = sizes[3];
  p.query = array_of(query);
  p.key = array_of(in.cache.key);
  p.value = array_of(in.cache.value);
  p.out = array_of(out);
  p.lse = lse.mutable_data_ptr();
  p.lse_head = p.rows;
  p.lse_batch = p.rows * p.heads;
  p.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = options.softcap;
  p.left = window_end(options.window_left);
  p.right = window_end(options.window_right);
  p.bottom_right = options.bottom_right;
  Tensor slopes, sinks;
  if (in.alibi_slopes.has_value()) {
    slopes = in.alibi_slopes->to(accumulate_type(query)).contiguous();
    p.alibi_slopes = slopes.const_data_ptr();
    p.alibi_batch = slopes.dim() == 2 ? p.heads : 0;
  }
  if (in.sinks.has_value()) {
    sinks = in.sinks->to(accumulate_type(query)).contiguous();
    p.sinks = sinks.const_data_ptr();
  }
  backend.decode(d, query);
  return {std::move(out), std::move(lse)};
}

void append(const Backend& backend, const AppendInputs& in) {
  if (in.rows_first) return append_rows_first(in, swapped_directly, [&](const AppendInputs& i) { append(backend, i); });
  check_append(in);
  if (in.key.numel() == 0 && in.value.numel() == 0) return;
  if (in.cache.key.size(0) == 0 || capacity(in.cache) == 0) return;
  const auto readable = [](const Tensor& t) { return t.size(3) <= 1 || t.stride(3) == 1 ? t : t.contiguous(); };
  const Tensor key = readable(in.key), value = readable(in.value);
  const Indices indices(in.cache);
  problem::Append a;
  a.dtype = dtype_of(key);
  a.batch = key.size(0);
  a.kv_heads = key.size(1);
  a.rows = key.size(2);
  a.keys = capacity(in.cache);
  a.head_dim = key.size(3);
  a.value_dim = value.size(3);
  a.new_key = array_of(key);
  a.new_value = array_of(value);
  a.key = array_of(in.cache.key);
  a.value = array_of(in.cache.value);
  a.key.data = in.cache.key.mutable_data_ptr();
  a.value.data = in.cache.value.mutable_data_ptr();
  a.cache = indices.cache(in.cache, 0);
  backend.append(a, in.cache.key);
}

}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, Meta, m) {
  using namespace flash::op;
  m.impl("attention_decode", TORCH_FN(flat_decode<meta>));
  m.impl("cache_append_", TORCH_FN(flat_append<meta_append>));
}

// No derivative: a call inside a graph runs, and backward through it raises by name.
TORCH_LIBRARY_IMPL(flash, Autograd, m) {
  m.impl("attention_decode", torch::autograd::autogradNotImplementedFallback());
  m.impl("cache_append_", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(flash, ADInplaceOrView, m) {
  m.impl("cache_append_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
