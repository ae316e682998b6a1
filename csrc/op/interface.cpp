// op/interface.cpp: the functions of flash_attn_ext/attention.h, which call the operators through the dispatcher.
#include "flash_attn_ext/attention.h"
#include "op/decode.h"

namespace flash {
namespace {

op::OptSymInt symbolic(const std::optional<int64_t>& x) { return x.has_value() ? op::OptSymInt(*x) : std::nullopt; }

op::Options options_of(const Options& o) {
  return {symbolic(o.window_left), symbolic(o.window_right), o.bottom_right, o.scale, o.softcap, o.dropout_p, o.deterministic};
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  return op::call_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

std::tuple<at::Tensor, at::Tensor> attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                     const Options& options, const std::optional<at::Tensor>& attn_mask,
                                                     const std::optional<at::Tensor>& alibi_slopes,
                                                     const std::optional<at::Tensor>& sinks,
                                                     const std::optional<at::Tensor>& seed) {
  return op::call_forward({query, key, value, attn_mask, alibi_slopes, sinks, seed}, options_of(options));
}

std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                                    int64_t max_seqlen_q, int64_t max_seqlen_k, const Options& options,
                                                    const std::optional<at::Tensor>& alibi_slopes,
                                                    const std::optional<at::Tensor>& sinks,
                                                    const std::optional<at::Tensor>& seed) {
  const op::Packed packed{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return op::call_forward({query, key, value, op::kNoTensor, alibi_slopes, sinks, seed, &packed}, options_of(options));
}

std::tuple<at::Tensor, at::Tensor> attention_decode(const at::Tensor& query, const Cache& cache, const Options& options,
                                                    int64_t appended, const std::optional<at::Tensor>& alibi_slopes,
                                                    const std::optional<at::Tensor>& sinks) {
  const op::CacheInputs in{cache.key, cache.value, cache.seqlens, cache.block_table, cache.batch_idx, cache.left_pad};
  return op::call_decode({query, in, alibi_slopes, sinks},
                         {appended, symbolic(options.window_left), symbolic(options.window_right), options.bottom_right,
                          options.scale, options.softcap});
}

void cache_append(const Cache& cache, const at::Tensor& key, const at::Tensor& value) {
  TORCH_CHECK(cache.seqlens.has_value(), "flash::cache_append: cache.seqlens must be given.");
  op::call_append({{cache.key, cache.value, cache.seqlens, cache.block_table, cache.batch_idx, op::kNoTensor}, key, value});
}

std::tuple<at::Tensor, at::Tensor> merge(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                                         const at::Tensor& lse_b) {
  return op::call_merge(out_a, lse_a, out_b, lse_b);
}

at::Tensor dropout_mask(const at::Tensor& seed, at::IntArrayRef size, double p) {
  return op::call_dropout_mask(seed, c10::fromIntArrayRefSlow(size), p);
}

std::string explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Options& options,
                    const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& alibi_slopes,
                    const std::optional<at::Tensor>& sinks) {
  return op::call_explain({query, key, value, attn_mask, alibi_slopes, sinks, op::kNoTensor}, options_of(options));
}

}  // namespace flash
