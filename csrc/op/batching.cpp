// op/batching.cpp: vmap. The mapped dimension joins the batch, so one call does the work of all samples. Where samples cannot
// share a call (each has its own dropout seed or sinks, needs its own gradient of the sinks, or is packed) they run one by one.
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include "op/arguments.h"
#include "op/check.h"

namespace flash::op {
namespace {

namespace functorch = at::functorch;

struct Level {
  int64_t id;
  c10::SymInt samples;
};

Level current_level() {
  const auto layer = functorch::maybeCurrentDynamicLayer();
  TORCH_INTERNAL_ASSERT(layer.has_value());
  return {layer->layerId(), layer->batchSize()};
}

// One argument: [samples, ...] if mapped, else as every sample sees it. May be undefined.
struct Mapped {
  Tensor tensor;
  bool mapped = false;

  Tensor sample(int64_t i) const { return mapped ? tensor.select(0, i) : tensor; }
};

Mapped unwrap(const Tensor& t, const Level& level) {
  if (!t.defined()) return {};
  auto [inner, dim] = functorch::unwrapTensorAtLevel(t, level.id);
  return dim.has_value() ? Mapped{inner.movedim(*dim, 0), true} : Mapped{inner, false};
}
Mapped unwrap(const OptTensor& t, const Level& level) { return unwrap(t.value_or(Tensor()), level); }

Tensor wrap(const Tensor& t, const Level& level) { return t.defined() ? functorch::makeBatched(t, 0, level.id) : t; }

OptTensor optional(Tensor t) { return t.defined() ? OptTensor(std::move(t)) : std::nullopt; }

// All arguments of a call, unwrapped.
struct MappedCall {
  Level level;
  Mapped query, key, value, attn_mask, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, grad_out, grad_lse, out, lse;
  const Packed* packed;
  c10::SymInt batch;  // of one sample

  MappedCall(const Inputs& in, const Results* results)
      : level(current_level()), packed(in.packed), batch(in.query.sym_size(0)) {
    query = unwrap(in.query, level);
    key = unwrap(in.key, level);
    value = unwrap(in.value, level);
    attn_mask = unwrap(in.attn_mask, level);
    alibi_slopes = unwrap(in.alibi_slopes, level);
    sinks = unwrap(in.sinks, level);
    seed = unwrap(in.seed, level);
    if (packed != nullptr) {
      cu_seqlens_q = unwrap(packed->cu_seqlens_q, level);
      cu_seqlens_k = unwrap(packed->cu_seqlens_k, level);
    }
    if (results != nullptr) {
      grad_out = unwrap(results->grad_out, level);
      grad_lse = unwrap(results->grad_lse, level);
      out = unwrap(results->out, level);
      lse = unwrap(results->lse, level);
    }
  }

  bool any_mapped() const {
    for (const Mapped* m : {&query, &key, &value, &attn_mask, &alibi_slopes, &sinks, &seed, &cu_seqlens_q, &cu_seqlens_k,
                            &grad_out, &grad_lse, &out, &lse}) {
      if (m->mapped) return true;
    }
    return false;
  }

  OwnedCall sample(int64_t i) const {
    OwnedCall c{query.sample(i),
                key.sample(i),
                value.sample(i),
                optional(attn_mask.sample(i)),
                optional(alibi_slopes.sample(i)),
                optional(sinks.sample(i)),
                optional(seed.sample(i)),
                {},
                grad_out.sample(i),
                optional(grad_lse.sample(i)),
                out.sample(i),
                lse.sample(i)};
    if (packed != nullptr) {
      c.packed = Packed{cu_seqlens_q.sample(i), cu_seqlens_k.sample(i), packed->max_seqlen_q, packed->max_seqlen_k};
    }
    return c;
  }

  // [samples * batch, ...]: a view if the strides allow one and the argument is mapped, or the batch is 1.
  Tensor fold(const Mapped& m) const {
    if (!m.tensor.defined()) return m.tensor;
    Tensor t = m.mapped ? m.tensor : m.tensor.unsqueeze(0);
    c10::SymDimVector sizes(t.sym_sizes().begin(), t.sym_sizes().end());
    sizes[0] = level.samples;
    sizes[1] = batch;
    return t.expand_symint(sizes).flatten(0, 1);
  }

  OwnedCall folded(bool mask_per_sample) const {
    // A mask that all samples and all of their batch share stays as small as it is.
    const bool shared =
        !mask_per_sample && !attn_mask.mapped && attn_mask.tensor.defined() && is_one(attn_mask.tensor.sym_size(0));
    Mapped slopes = alibi_slopes;  // [H] is shared; else [samples, batch, H]
    if (slopes.mapped && slopes.tensor.dim() == 2) slopes.tensor = slopes.tensor.unsqueeze(1);
    const bool per_batch = slopes.tensor.defined() && (slopes.mapped || slopes.tensor.dim() == 2);
    return {fold(query),
            fold(key),
            fold(value),
            optional(shared ? attn_mask.tensor : fold(attn_mask)),
            optional(per_batch ? fold(slopes) : slopes.tensor),
            optional(sinks.tensor),
            {},
            {},
            fold(grad_out),
            optional(fold(grad_lse)),
            fold(out),
            fold(lse)};
  }

  // [samples * batch, ...] -> [samples, batch, ...]
  Tensor unfold(const Tensor& t) const {
    c10::SymDimVector sizes(t.sym_sizes().begin(), t.sym_sizes().end());
    sizes[0] = batch;
    sizes.insert(sizes.begin(), level.samples);
    return t.reshape_symint(sizes);
  }
};

Tensor stack(const std::vector<Tensor>& samples) { return samples.front().defined() ? at::stack(samples) : Tensor(); }

// Runs call(i) -> std::array<Tensor, N> for every sample and stacks what comes back.
template <size_t N, class Call>
std::array<Tensor, N> one_by_one(const Level& level, const Call& call) {
  const int64_t count = level.samples.guard_int(__FILE__, __LINE__);
  TORCH_CHECK(count > 0, "flash::attention: vmap over no samples is not supported with dropout, sinks or packed sequences.");
  std::array<std::vector<Tensor>, N> all;
  for (int64_t i = 0; i < count; ++i) {
    const std::array<Tensor, N> one = call(i);
    for (size_t n = 0; n < N; ++n) all[n].push_back(one[n]);
  }
  std::array<Tensor, N> result;
  for (size_t n = 0; n < N; ++n) result[n] = wrap(stack(all[n]), level);
  return result;
}

OutLse forward(const Inputs& in, const Options& options) {
  const MappedCall call(in, nullptr);
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  if (!call.any_mapped()) return call_forward(call.sample(0).inputs(), options);
  if (call.packed != nullptr || options.dropout_p > 0.0 || call.sinks.mapped) {
    auto [out, lse] = one_by_one<2>(call.level, [&](int64_t i) -> std::array<Tensor, 2> {
      auto [out, lse] = call_forward(call.sample(i).inputs(), options);
      return {out, lse};
    });
    return {out, lse};
  }
  const auto [out, lse] = call_forward(call.folded(false).inputs(), options);
  return {wrap(call.unfold(out), call.level), wrap(call.unfold(lse), call.level)};
}

Gradients5 backward(const Results& results, const Inputs& in, const Options& options, Wanted wanted) {
  const MappedCall call(in, &results);
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  if (!call.any_mapped()) {
    const OwnedCall one = call.sample(0);
    return call_backward(one.results(), one.inputs(), options, wanted);
  }
  if (call.packed != nullptr || options.dropout_p > 0.0 || call.sinks.mapped || wanted[kSinks]) {
    return one_by_one<5>(call.level, [&](int64_t i) {
      const OwnedCall one = call.sample(i);
      return call_backward(one.results(), one.inputs(), options, wanted);
    });
  }
  const OwnedCall folded = call.folded(wanted[kMask]);
  Gradients5 gradients = call_backward(folded.results(), folded.inputs(), options, wanted);
  for (Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = call.unfold(gradient);
  }
  if (gradients[kMask].defined()) {  // folding expanded a mask with a batch of 1
    const c10::SymInt mask_batch = call.attn_mask.tensor.sym_size(call.attn_mask.mapped ? 1 : 0);
    if (differ(mask_batch, call.batch)) gradients[kMask] = gradients[kMask].sum(1, true);
  }
  for (Tensor& gradient : gradients) gradient = wrap(gradient, call.level);
  return gradients;
}

OutLse merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const Level level = current_level();
  const auto unwrapped = std::array{unwrap(out_a, level), unwrap(lse_a, level), unwrap(out_b, level), unwrap(lse_b, level)};
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  bool any = false;
  for (const Mapped& m : unwrapped) any = any || m.mapped;
  const auto widen = [&](const Mapped& m) {
    if (!any || m.mapped) return m.tensor;
    c10::SymDimVector sizes(m.tensor.sym_sizes().begin(), m.tensor.sym_sizes().end());
    sizes.insert(sizes.begin(), level.samples);
    return m.tensor.unsqueeze(0).expand_symint(sizes);
  };
  auto [out, lse] = call_merge(widen(unwrapped[0]), widen(unwrapped[1]), widen(unwrapped[2]), widen(unwrapped[3]));
  if (!any) return {out, lse};
  return {wrap(out, level), wrap(lse, level)};
}

Tensor dropout_mask(const Tensor& seed, c10::SymIntArrayRef size, double p) {
  const Level level = current_level();
  const Mapped mapped = unwrap(seed, level);
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  if (!mapped.mapped) return call_dropout_mask(mapped.tensor, size, p);
  return one_by_one<1>(level,
                       [&](int64_t i) -> std::array<Tensor, 1> { return {call_dropout_mask(mapped.sample(i), size, p)}; })[0];
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, FuncTorchBatched, m) {
  using namespace flash::op;
  m.impl("attention_forward", TORCH_FN(flat_forward<forward>));
  m.impl("attention_backward", TORCH_FN(flat_backward<backward>));
  m.impl("attention_varlen_forward", TORCH_FN(flat_varlen_forward<forward>));
  m.impl("attention_varlen_backward", TORCH_FN(flat_varlen_backward<backward>));
  m.impl("merge", TORCH_FN(merge));
  m.impl("dropout_mask", TORCH_FN(dropout_mask));
}
