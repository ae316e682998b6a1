// op/attention.cpp: flash::attention has SDPA's meaning: any rank from 2 on, broadcasting as in matmul, top-left causal,
// dropout drawn from torch's generator. It is a composite: views around one call of attention_forward, which has the kernels
// and the derivative. Nothing is expanded in memory; only five and more dimensions that do not fold into four are copied.
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand_like.h>
#include <torch/library.h>

#include "op/arguments.h"
#include "op/check.h"

namespace flash::op {
namespace {

using Sizes = c10::SmallVector<c10::SymInt, 8>;

// The size of dimension -1 - place, 1 where the tensor has none.
c10::SymInt size_from_end(const Tensor& t, int64_t place) {
  return place < t.dim() ? t.sym_size(t.dim() - 1 - place) : c10::SymInt(1);
}

// Combines two sizes as matmul broadcasts; false if they do not fit.
bool broadcast(c10::SymInt& size, const c10::SymInt& other) {
  if (is_one(other)) return true;
  if (is_one(size)) {
    size = other;
    return true;
  }
  return !differ(size, other);
}

// What the call comes to: [batch..., heads, L, *] with kv_heads for key and value.
struct Shape {
  int64_t rank;       // of the result
  Sizes batch;        // rank - 3 of them
  c10::SymInt heads;  // of query
  c10::SymInt kv_heads;
  c10::SymInt rows, keys;
};

void check_ranks(const Tensor& query, const Tensor& key, const Tensor& value, Reasons& reasons) {
  if (query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2) return;
  reasons.add("Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(),
              " key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
}

Shape shape_of(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa, Reasons& reasons) {
  Shape s{std::max({query.dim(), key.dim(), value.dim()}), {}, {}, {}, query.sym_size(-2), key.sym_size(-2)};
  for (int64_t place = s.rank - 1; place > 2; --place) {
    c10::SymInt size = size_from_end(query, place);
    if (!broadcast(size, size_from_end(key, place)) || !broadcast(size, size_from_end(value, place))) {
      reasons.add("query, key and value have the sizes ", query.sym_sizes(), ", ", key.sym_sizes(), " and ", value.sym_sizes(),
                  ": batch dimensions must be equal or 1.");
      return s;
    }
    s.batch.push_back(size);
  }
  s.heads = size_from_end(query, 2);
  s.kv_heads = size_from_end(key, 2);
  const c10::SymInt value_heads = size_from_end(value, 2);
  if (enable_gqa) {
    const bool divides = !differ(s.heads, s.kv_heads) || (differ(s.kv_heads, 0) && !differ(s.heads % s.kv_heads, 0));
    if (differ(s.kv_heads, value_heads) || !divides) {
      reasons.add("Number of heads in key and value must divide the number of heads in query and be equal, but got ",
                  s.kv_heads, ", ", value_heads, " and ", s.heads, ".");
    }
    return s;
  }
  const bool same = !differ(s.kv_heads, value_heads);
  const c10::SymInt query_heads = s.heads;
  if (!broadcast(s.kv_heads, value_heads) || !broadcast(s.heads, s.kv_heads)) {
    reasons.add(
        "query, key and value have ", query_heads, ", ", size_from_end(key, 2), " and ", value_heads,
        " heads: they must be equal or 1; pass enable_gqa=True if each head of key and value serves a group of query's.");
  }
  if (!same) s.kv_heads = s.heads;  // else one head of key and value serves all of query's, unexpanded
  return s;
}

void check_mask(const Tensor& mask, const Tensor& query, const Shape& s, Reasons& reasons) {
  check_mask_type(query, mask, reasons);
  bool fits = mask.dim() <= std::max<int64_t>(s.rank, 2);
  for (int64_t place = 0; fits && place < mask.dim(); ++place) {
    const c10::SymInt& full = place == 0   ? s.keys
                              : place == 1 ? s.rows
                              : place == 2 ? s.heads
                                           : s.batch[static_cast<size_t>(s.rank - 1 - place)];
    const c10::SymInt size = size_from_end(mask, place);
    fits = is_one(size) || !differ(size, full);
  }
  if (fits) return;
  Sizes full(s.batch);
  if (s.rank > 2) full.push_back(s.heads);
  full.push_back(s.rows);
  full.push_back(s.keys);
  reasons.add("attn_mask has the sizes ", mask.sym_sizes(), ", which do not broadcast to ", c10::SymIntArrayRef(full), ".");
}

// Views a tensor as [..., heads, L, *] of `rank` dimensions, batch and heads expanded (stride 0) where they are broadcast.
Tensor widen(Tensor t, const Shape& s, const c10::SymInt& heads) {
  while (t.dim() < std::max<int64_t>(s.rank, 4)) t = t.unsqueeze(0);
  const auto have = t.sym_sizes();
  bool same = !differ(size_from_end(t, 2), heads);
  for (size_t i = 0; same && i < s.batch.size(); ++i) same = !differ(have[i], s.batch[i]);
  if (same) return t;
  Sizes sizes(have);
  for (size_t i = 0; i < s.batch.size(); ++i) sizes[i] = s.batch[i];
  sizes[sizes.size() - 3] = heads;
  return t.expand_symint(sizes);
}

// Five and more dimensions: the first `split` of the batch become B, the others join the heads. The mask must not grow, so the
// split is the last one for which it is a view: each part either full or broadcast. If there is none, the mask is expanded.
struct Fold {
  int64_t split;
  bool mask_is_view;
};

Fold choose_fold(const Shape& s, const Tensor& mask) {
  const int64_t batch = s.rank - 3;
  const auto uniform = [&](int64_t first, int64_t last) {  // of mask dimensions [first, last), which have the sizes of full
    bool all_one = true, all_full = true;
    for (int64_t i = first; i < last; ++i) {
      const c10::SymInt& full = i < batch ? s.batch[static_cast<size_t>(i)] : s.heads;
      if (is_one(full)) continue;
      (is_one(mask.sym_size(i)) ? all_full : all_one) = false;
    }
    return all_one || all_full;
  };
  if (!mask.defined()) return {batch, true};
  for (int64_t split = batch; split >= 0; --split) {
    if (uniform(0, split) && uniform(split, batch + 1)) return {split, true};
  }
  return {batch, false};
}

// [batch..., heads, L, *] -> [B, H, L, *]: a view if the strides allow one.
Tensor fold(const Tensor& t, int64_t split) {
  const auto have = t.sym_sizes();
  const size_t heads = have.size() - 3;
  c10::SymInt first = 1, second = have[heads];
  for (size_t i = 0; i < heads; ++i) {
    if (static_cast<int64_t>(i) < split) {
      first = first * have[i];
    } else {
      second = second * have[i];
    }
  }
  return t.reshape_symint({first, second, have[heads + 1], have[heads + 2]});
}

Tensor fold_mask(const Tensor& mask, const Shape& s, const Fold& how) {
  if (how.mask_is_view) return fold(mask, how.split);
  Sizes sizes(mask.sym_sizes());
  for (size_t i = 0; i < s.batch.size(); ++i) sizes[i] = s.batch[i];
  return fold(mask.expand_symint(sizes), how.split);
}

// By new_empty, so that the seed of a DTensor is a DTensor.
Tensor draw_seed(const Tensor& query) { return at::rand_like(query.new_empty({2}, query.options().dtype(at::kDouble))); }

// Neither ranks nor sizes need a change: the common case, without a view.
bool is_plain(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, const Shape& s) {
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && (!attn_mask.has_value() || attn_mask->dim() == 4) &&
         !differ(query.sym_size(0), s.batch[0]) && !differ(key.sym_size(0), s.batch[0]) &&
         !differ(value.sym_size(0), s.batch[0]) && !differ(query.sym_size(1), s.heads) &&
         !differ(key.sym_size(1), s.kv_heads) && !differ(value.sym_size(1), s.kv_heads);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, double dropout_p,
                 bool is_causal, OptDouble scale, bool enable_gqa) {
  Reasons reasons;
  check_strided(query, key, value, reasons);
  check_ranks(query, key, value, reasons);
  reasons.raise("flash::attention");
  check_same_type(query, key, value, reasons);
  check_dropout(dropout_p, reasons);
  const Shape s = shape_of(query, key, value, enable_gqa, reasons);
  if (attn_mask.has_value()) {
    if (is_causal) {
      reasons.add(
          "Explicit attn_mask should not be set when is_causal=True: use flash_attn_ext.attention, which takes both, "
          "or put the causal part into the mask.");
    }
    if (reasons.empty()) check_mask(*attn_mask, query, s, reasons);
  }
  if (!reasons.empty()) reasons.raise("flash::attention");

  Options options;
  if (is_causal) options.window_right = 0;
  options.scale = scale;
  options.dropout_p = dropout_p;
  const OptTensor seed = dropout_p > 0.0 ? OptTensor(draw_seed(query)) : std::nullopt;
  if (is_plain(query, key, value, attn_mask, s)) {
    return std::get<0>(call_forward({query, key, value, attn_mask, kNoTensor, kNoTensor, seed}, options));
  }
  Tensor q = widen(query, s, s.heads), k = widen(key, s, s.kv_heads), v = widen(value, s, s.kv_heads);
  OptTensor mask = attn_mask;
  if (mask.has_value()) {
    while (mask->dim() < q.dim()) mask = mask->unsqueeze(0);
  }
  if (s.rank <= 4) {
    Tensor out = std::get<0>(call_forward({q, k, v, mask, kNoTensor, kNoTensor, seed}, options));
    for (int64_t rank = 4; rank > s.rank; --rank) out = out.squeeze(0);
    return out;
  }
  const Fold how = choose_fold(s, mask.value_or(Tensor()));
  if (mask.has_value()) mask = fold_mask(*mask, s, how);
  q = fold(q, how.split);
  k = fold(k, how.split);
  v = fold(v, how.split);
  const Tensor out = std::get<0>(call_forward({q, k, v, mask, kNoTensor, kNoTensor, seed}, options));
  Sizes sizes(s.batch);
  sizes.push_back(s.heads);
  sizes.push_back(s.rows);
  sizes.push_back(out.sym_size(-1));
  return out.view_symint(sizes);
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, CompositeImplicitAutograd, m) { m.impl("attention", TORCH_FN(flash::op::attention)); }

// vmap decomposes composites of torch itself only; a custom one has to say so.
TORCH_LIBRARY_IMPL(flash, FuncTorchBatchedDecomposition, m) { m.impl("attention", TORCH_FN(flash::op::attention)); }
