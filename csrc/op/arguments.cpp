// op/arguments.cpp: calls of our own operators through the dispatcher.
#include "op/arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace flash::op {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

Tensor call_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, double dropout_p,
                      bool is_causal, OptDouble scale, bool enable_gqa) {
  static const auto op = find<decltype(call_attention)>("flash::attention");
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

OutLse call_forward(const Inputs& in, const Options& o) {
  if (in.packed != nullptr) {
    static const auto op = find<decltype(flat_varlen_forward<nullptr>)>("flash::attention_varlen_forward");
    const Packed& p = *in.packed;
    return op.call(in.query, in.key, in.value, p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k, in.alibi_slopes,
                   in.sinks, in.seed, o.window_left, o.window_right, o.bottom_right, o.scale, o.softcap, o.dropout_p,
                   o.deterministic);
  }
  static const auto op = find<decltype(flat_forward<nullptr>)>("flash::attention_forward");
  return op.call(in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.sinks, in.seed, o.window_left, o.window_right,
                 o.bottom_right, o.scale, o.softcap, o.dropout_p, o.deterministic);
}

Gradients5 call_backward(const Results& results, const Inputs& in, const Options& o, Wanted wanted) {
  if (in.packed != nullptr) {
    static const auto op = find<decltype(flat_varlen_backward<nullptr>)>("flash::attention_varlen_backward");
    const Packed& p = *in.packed;
    auto [dquery, dkey, dvalue, dsinks] =
        op.call(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out, results.lse, p.cu_seqlens_q,
                p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k, in.alibi_slopes, in.sinks, in.seed,
                {wanted[kQuery], wanted[kKey], wanted[kValue], wanted[kSinks]}, o.window_left, o.window_right, o.bottom_right,
                o.scale, o.softcap, o.dropout_p, o.deterministic);
    return {std::move(dquery), std::move(dkey), std::move(dvalue), Tensor(), std::move(dsinks)};
  }
  static const auto op = find<decltype(flat_backward<nullptr>)>("flash::attention_backward");
  auto [dquery, dkey, dvalue, dmask, dsinks] =
      op.call(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out, results.lse, in.attn_mask,
              in.alibi_slopes, in.sinks, in.seed, wanted, o.window_left, o.window_right, o.bottom_right, o.scale, o.softcap,
              o.dropout_p, o.deterministic);
  return {std::move(dquery), std::move(dkey), std::move(dvalue), std::move(dmask), std::move(dsinks)};
}

OutLse call_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  static const auto op = find<OutLse(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>("flash::merge");
  return op.call(out_a, lse_a, out_b, lse_b);
}

Tensor call_dropout_mask(const Tensor& seed, c10::SymIntArrayRef size, double p) {
  static const auto op = find<Tensor(const Tensor&, c10::SymIntArrayRef, double)>("flash::dropout_mask");
  return op.call(seed, size, p);
}

std::string call_explain(const Inputs& in, const Options& o) {
  static const auto op = find<decltype(flat_explain<nullptr>)>("flash::explain");
  return op.call(in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.sinks, o.window_left, o.window_right,
                 o.bottom_right, o.softcap, o.dropout_p, o.deterministic);
}

}  // namespace flash::op
