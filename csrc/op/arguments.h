// op/arguments.h: the argument lists of the schemas, written down once. A kernel of any dispatch key is a function of
// (Inputs, Options); Flat<kernel> gives it the flat signature that the dispatcher wants, call_* go the other way.
// Dense and packed attention differ only in Inputs::packed, so every key handles both with one function.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

namespace flash::op {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using OptSymInt = std::optional<c10::SymInt>;
using OptDouble = std::optional<double>;
using OptBool = std::optional<bool>;

// Where the sequences of packed tensors lie.
struct Packed {
  Tensor cu_seqlens_q, cu_seqlens_k;  // [B + 1] int32, on the device
  c10::SymInt max_seqlen_q, max_seqlen_k;
};

// The tensors of one call. References: valid as long as the caller's arguments.
struct Inputs {
  const Tensor& query;            // [B, H, L, E], packed: [total_q, H, E]
  const Tensor& key;              // [B, Hk, S, E], packed: [total_k, Hk, E]
  const Tensor& value;            // [B, Hk, S, Ev], packed: [total_k, Hk, Ev]
  const OptTensor& attn_mask;     // [1|B, 1|H, 1|L, 1|S]; none when packed
  const OptTensor& alibi_slopes;  // [H] or [B, H]
  const OptTensor& sinks;         // [H]
  const OptTensor& seed;          // [2] float64
  const Packed* packed = nullptr;
};

struct Options {
  OptSymInt window_left, window_right;
  bool bottom_right = false;
  OptDouble scale;
  double softcap = 0.0, dropout_p = 0.0;
  OptBool deterministic;
};

// What backward gets beside the inputs of forward. out and lse may come from elsewhere.
struct Results {
  const Tensor& grad_out;     // [B, H, L, Ev], packed: [total_q, H, Ev]
  const OptTensor& grad_lse;  // [B, H, L], packed: [H, total_q]
  const Tensor& out;          // as grad_out
  const Tensor& lse;          // as grad_lse
};

// The same, owned: what a node keeps or a batching rule makes up. Backward's part stays undefined in a forward call.
struct OwnedCall {
  Tensor query, key, value;
  OptTensor attn_mask, alibi_slopes, sinks, seed;
  std::optional<Packed> packed;
  Tensor grad_out;
  OptTensor grad_lse;
  Tensor out, lse;

  Inputs inputs() const {
    return {query, key, value, attn_mask, alibi_slopes, sinks, seed, packed.has_value() ? &*packed : nullptr};
  }
  Results results() const { return {grad_out, grad_lse, out, lse}; }
};

using OutLse = std::tuple<Tensor, Tensor>;

enum Gradient { kQuery, kKey, kValue, kMask, kSinks };
using Wanted = std::array<bool, 5>;
using Gradients5 = std::array<Tensor, 5>;  // undefined where not wanted

// Calls through the dispatcher, with whatever keys are active.
Tensor call_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, double dropout_p,
                      bool is_causal, OptDouble scale, bool enable_gqa);
OutLse call_forward(const Inputs& inputs, const Options& options);
Gradients5 call_backward(const Results& results, const Inputs& inputs, const Options& options, Wanted wanted);
OutLse call_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);
Tensor call_dropout_mask(const Tensor& seed, c10::SymIntArrayRef size, double p);
std::string call_explain(const Inputs& inputs, const Options& options);

inline const OptTensor kNoTensor;

using Forward = OutLse(const Inputs&, const Options&);
using Backward = Gradients5(const Results&, const Inputs&, const Options&, Wanted);

using Explain = std::string(const Inputs&, const Options&);

// The flat signatures of attention_(varlen_)forward, attention_(varlen_)backward and explain.
template <Forward* kernel>
OutLse flat_forward(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask,
                    const OptTensor& alibi_slopes, const OptTensor& sinks, const OptTensor& seed, OptSymInt window_left,
                    OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, double dropout_p,
                    OptBool deterministic) {
  return kernel({query, key, value, attn_mask, alibi_slopes, sinks, seed},
                {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, dropout_p, deterministic});
}

template <Forward* kernel>
OutLse flat_varlen_forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                           const Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
                           const OptTensor& alibi_slopes, const OptTensor& sinks, const OptTensor& seed, OptSymInt window_left,
                           OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, double dropout_p,
                           OptBool deterministic) {
  const Packed packed{cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k)};
  return kernel({query, key, value, kNoTensor, alibi_slopes, sinks, seed, &packed},
                {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, dropout_p, deterministic});
}

template <Backward* kernel>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flat_backward(
    const Tensor& grad_out, const OptTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const OptTensor& attn_mask, const OptTensor& alibi_slopes, const OptTensor& sinks,
    const OptTensor& seed, std::array<bool, 5> output_mask, OptSymInt window_left, OptSymInt window_right, bool bottom_right,
    OptDouble scale, double softcap, double dropout_p, OptBool deterministic) {
  auto [dquery, dkey, dvalue, dmask, dsinks] = kernel(
      {grad_out, grad_lse, out, lse}, {query, key, value, attn_mask, alibi_slopes, sinks, seed},
      {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, dropout_p, deterministic}, output_mask);
  return {std::move(dquery), std::move(dkey), std::move(dvalue), std::move(dmask), std::move(dsinks)};
}

template <Backward* kernel>
std::tuple<Tensor, Tensor, Tensor, Tensor> flat_varlen_backward(
    const Tensor& grad_out, const OptTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
    c10::SymInt max_seqlen_k, const OptTensor& alibi_slopes, const OptTensor& sinks, const OptTensor& seed,
    std::array<bool, 4> output_mask, OptSymInt window_left, OptSymInt window_right, bool bottom_right, OptDouble scale,
    double softcap, double dropout_p, OptBool deterministic) {
  const Packed packed{cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k)};
  auto [dquery, dkey, dvalue, dmask, dsinks] =
      kernel({grad_out, grad_lse, out, lse}, {query, key, value, kNoTensor, alibi_slopes, sinks, seed, &packed},
             {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, dropout_p, deterministic},
             {output_mask[0], output_mask[1], output_mask[2], false, output_mask[3]});
  return {std::move(dquery), std::move(dkey), std::move(dvalue), std::move(dsinks)};
}

template <Explain* kernel>
std::string flat_explain(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask,
                         const OptTensor& alibi_slopes, const OptTensor& sinks, OptSymInt window_left, OptSymInt window_right,
                         bool bottom_right, double softcap, double dropout_p, OptBool deterministic) {
  return kernel({query, key, value, attn_mask, alibi_slopes, sinks, kNoTensor},
                {std::move(window_left), std::move(window_right), bottom_right, {}, softcap, dropout_p, deterministic});
}

}  // namespace flash::op
