// op/decode.cpp: attention_decode and cache_append_: tensors -> Decode, and the keys that no device has.
#include "op/decode.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>

#include "op/backend.h"
#include "op/check.h"
#include "op/layout.h"
#include "op/rows_first.h"

namespace flash::op {
namespace {

using problem::Cache;

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

// Rows that see no key.
void see_nothing(const OptTensor& sinks, const Tensor& out, const Tensor& lse) {
  clear_results(out, lse);
  if (sinks.has_value() && lse.numel() > 0) lse.copy_(sinks->to(lse.scalar_type()).view({1, -1, 1}).expand_as(lse));
}

// Sizes, query, key, value and out.
void set_operands(const Tensor& query, const CacheInputs& cache, const Tensor& out, problem::Problem& p) {
  p.dtype = dtype_of(query);
  p.batch = query.size(0);
  p.heads = query.size(1);
  p.kv_heads = cache.key.size(1);
  p.rows = query.size(2);
  p.keys = capacity(cache);
  p.head_dim = query.size(3);
  p.value_dim = out.size(3);
  p.query = array_of(query);
  p.key = array_of(cache.key);
  p.value = array_of(cache.value);
  p.out = array_of(out);
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
    TORCH_CHECK(keys == 0 || in.query.size(3) > 0 || lse.numel() == 0,
                "flash::attention_decode: query has head_dim 0: it must be at least 1.");
    see_nothing(in.sinks, out, lse);
    return {std::move(out), std::move(lse)};
  }
  const Tensor query = dense(in.query);
  const Indices indices(in.cache);
  problem::Decode d;
  d.cache = indices.cache(in.cache, options.appended.guard_int(__FILE__, __LINE__));
  problem::Problem& p = d.problem;
  set_operands(query, in.cache, out, p);
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
    slopes = accumulated(in.alibi_slopes, query);
    p.alibi_slopes = slopes.const_data_ptr();
    p.alibi_batch = slopes.dim() == 2 ? p.heads : 0;
  }
  if (in.sinks.has_value()) {
    sinks = accumulated(in.sinks, query);
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
  const Tensor key = dense(in.key), value = dense(in.value);
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
