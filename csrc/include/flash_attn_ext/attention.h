// flash_attn_ext/attention.h: the operators of flash_attn_ext for C++ programs that use LibTorch. No Python is needed, backward
// included: these functions take part in torch's autograd, autocast and dispatch like any of its own.
//   find_package(flash_attn_ext REQUIRED)               # python -m flash_attn_ext --cmake prints the prefix
//   target_link_libraries(program PRIVATE flash_attn_ext::flash_attn_ext)
// Sizes: B batch, H heads of query, Hk heads of key and value (Hk divides H), L query rows, S keys, E head dimension,
// Ev dimension of value. Any strides: [B, L, H, E] data is passed as x.transpose(1, 2) without a copy. Errors are c10::Error.
// A program that loads libflash_attn_ext.so with dlopen finds the same operators in c10::Dispatcher ("flash::attention", ...).
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#define FLASH_ATTN_EXT_API __attribute__((visibility("default")))

namespace flash {

// torch's scaled_dot_product_attention, argument for argument. Returns [..., H, L, Ev] of query's dtype, in query's order.
FLASH_ATTN_EXT_API at::Tensor attention(
    const at::Tensor& query,                          // [..., H, L, E], fp16, bf16, fp32 or fp64, rank 2 at least
    const at::Tensor& key,                            // [..., Hk, S, E]
    const at::Tensor& value,                          // [..., Hk, S, Ev]
    const std::optional<at::Tensor>& attn_mask = {},  // broadcastable to [..., H, L, S]; bool: true takes part; float: added
    double dropout_p = 0.0,                           // in [0, 1], applied whenever > 0
    bool is_causal = false,                           // row i sees keys <= i (top-left); not together with attn_mask
    std::optional<double> scale = {},                 // multiplies query . key; none: 1 / sqrt(E)
    bool enable_gqa = false);                         // query head h reads key and value head h / (H / Hk)

// What attention_forward and attention_varlen have beyond tensors.
struct Options {
  std::optional<int64_t> window_left = {};   // row i sees keys from i + d - window_left
  std::optional<int64_t> window_right = {};  // to i + d + window_right, both included; none: open. Causal: window_right = 0
  bool bottom_right = false;                 // d = S - L, so that the last row sees the last key; else d = 0
  std::optional<double> scale = {};          // none: 1 / sqrt(E)
  double softcap = 0.0;                      // c > 0: score becomes c * tanh(score / c)
  double dropout_p = 0.0;                    // needs a seed
  std::optional<bool> deterministic = {};    // of backward; none: as at::globalContext() says when it runs
};

// One dense call with everything spelled out. Returns out [B, H, L, Ev] and lse [B, H, L]: natural logarithm of the softmax
// sum, fp32 (fp64 for fp64), -inf for a row that sees nothing; both differentiable.
FLASH_ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& query,  // [B, H, L, E]
    const at::Tensor& key,    // [B, Hk, S, E]
    const at::Tensor& value,  // [B, Hk, S, Ev]
    const Options& options = {},
    const std::optional<at::Tensor>& attn_mask = {},     // [1 or B, 1 or H, 1 or L, 1 or S], and-ed with the window
    const std::optional<at::Tensor>& alibi_slopes = {},  // [H] or [B, H]: score -= slope * |i + d - j|; no gradient
    const std::optional<at::Tensor>& sinks = {},         // [H]: a logit that joins the softmax sum and no value; differentiable
    const std::optional<at::Tensor>& seed = {});         // [2] fp64, such as torch::rand; the same seed drops the same elements

// Sequences laid end to end; sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1].
// Returns out [total_q, H, Ev] and lse [H, total_q].
FLASH_ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> attention_varlen(
    const at::Tensor& query,                             // [total_q, H, E]
    const at::Tensor& key,                               // [total_k, Hk, E]
    const at::Tensor& value,                             // [total_k, Hk, Ev]
    const at::Tensor& cu_seqlens_q,                      // [B + 1] int32, on query's device, never read by the host
    const at::Tensor& cu_seqlens_k,                      // [B + 1] int32
    int64_t max_seqlen_q,                                // upper bound of the lengths
    int64_t max_seqlen_k,                                // upper bound
    const Options& options = {},                         // d is per sequence
    const std::optional<at::Tensor>& alibi_slopes = {},  // [H] or [B, H]
    const std::optional<at::Tensor>& sinks = {},         // [H]
    const std::optional<at::Tensor>& seed = {});         // [2] fp64

// Where the keys and values of sequences lie, and how many there are. Index tensors are int32, on the device, never read by the host.
struct Cache {
  at::Tensor key;    // [B, Hk, S, E] of any strides, last dimension dense; with block_table [pages, Hk, page size, E]
  at::Tensor value;  // the same with Ev for E
  std::optional<at::Tensor> seqlens = {};      // [B] keys of each sequence; none: S
  std::optional<at::Tensor> block_table = {};  // [B, blocks]: the i-th page of a sequence
  std::optional<at::Tensor> batch_idx = {};    // [B]: which entry of the cache each sequence has; not with block_table
  std::optional<at::Tensor> left_pad = {};     // [B]: first keys that no row sees
};

// Few query rows over a long cache. No derivative. Sequences have cache.seqlens + appended keys; bottom_right should be true for rows
// that are the last ones of their sequence. dropout_p and deterministic of the options are not used.
FLASH_ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> attention_decode(
    const at::Tensor& query,  // [B, H, L, E]
    const Cache& cache, const Options& options = {}, int64_t appended = 0,
    const std::optional<at::Tensor>& alibi_slopes = {},  // [H] or [B, H]
    const std::optional<at::Tensor>& sinks = {});        // [H]

// Writes new keys and values into a cache, behind the seqlens of each sequence. Rows that it has no room for are dropped.
FLASH_ATTN_EXT_API void cache_append(const Cache& cache,
                                     const at::Tensor& key,     // [B, Hk, L, E]
                                     const at::Tensor& value);  // [B, Hk, L, Ev]

// Attention over the union of two disjoint sets of keys, from the results over each: out [..., Ev] and lse [...], natural
// logarithm. A part whose lse is -inf leaves the other as it is.
FLASH_ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> merge(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                            const at::Tensor& out_b, const at::Tensor& lse_b);

// What dropout keeps under a seed: bool [B, H, L, S].
FLASH_ATTN_EXT_API at::Tensor dropout_mask(const at::Tensor& seed, at::IntArrayRef size, double p);

// Which kernel attention_forward and its backward would run and why, as text. Runs nothing.
FLASH_ATTN_EXT_API std::string explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const Options& options = {}, const std::optional<at::Tensor>& attn_mask = {},
                                       const std::optional<at::Tensor>& alibi_slopes = {},
                                       const std::optional<at::Tensor>& sinks = {});

}  // namespace flash
