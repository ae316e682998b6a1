// op/schema.cpp: every operator of the library, one schema each. Kernels register themselves in one file per dispatch key.
#include <torch/library.h>

TORCH_LIBRARY(flash, m) {
  // SDPA's signature and meaning. query [..., H, L, E], key [..., H, S, E], value [..., H, S, Ev], attn_mask broadcastable to
  // [..., H, L, S]; is_causal is top-left. Returns [..., H, L, Ev] in query's dimension order.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
      "float? scale=None, bool enable_gqa=False) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});

  // query [B, H, L, E], key [B, Hk, S, E], value [B, Hk, S, Ev]; attn_mask [1|B, 1|H, 1|L, 1|S] bool, fp32 or query's dtype;
  // alibi_slopes [H] or [B, H]; sinks [H]; seed: 2 float64, needed if dropout_p > 0. Slopes and sinks may have any float dtype:
  // they are converted to fp32 (fp64 with fp64 inputs), the gradient of sinks back.
  // Row i sees keys [i + d - window_left, i + d + window_right], None = open, d = bottom_right ? S - L : 0.
  // deterministic: of the backward; None = torch.are_deterministic_algorithms_enabled() when it runs.
  // Returns out [B, H, L, Ev] and lse [B, H, L]: natural log, fp32 (fp64 for fp64), -inf for a row that sees nothing.
  m.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor? seed=None, *, SymInt? window_left=None, SymInt? window_right=None, bool bottom_right=False, "
      "float? scale=None, float softcap=0.0, float dropout_p=0.0, bool? deterministic=None) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});

  // attention_forward of [B, L, H, E] tensors, without what needs a seed. Views around attention_forward would do, but cost the host
  // more, and so do keywords. Returns out [B, L, H, Ev] and lse [B, H, L]. heads_first_in: only out has rows first.
  m.def(
      "attention_rows_first(Tensor query, Tensor key, Tensor value, SymInt? window_left=None, SymInt? window_right=None, "
      "bool bottom_right=False, float? scale=None, float softcap=0.0, bool heads_first_in=False, bool? deterministic=None) "
      "-> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});

  // The derivative of attention_rows_first where compiled autograd traces it: gradients have no sizes there, so they must go into one
  // operator. Has no derivative.
  m.def(
      "attention_rows_first_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, SymInt? window_left, SymInt? window_right, bool bottom_right, float? scale, float softcap, "
      "bool heads_first_in, bool? deterministic) -> (Tensor dquery, Tensor dkey, Tensor dvalue)",
      {at::Tag::pt2_compliant_tag});

  // Gradients of attention_forward from its inputs and outputs alone; out and lse may come from elsewhere (ring attention).
  // output_mask says which of the five are wanted; the others are undefined. dmask has attn_mask's shape.
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, bool[5] output_mask, *, SymInt? window_left=None, "
      "SymInt? window_right=None, bool bottom_right=False, float? scale=None, float softcap=0.0, float dropout_p=0.0, "
      "bool? deterministic=None) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dmask, Tensor dsinks)",
      {at::Tag::pt2_compliant_tag});

  // Packed sequences: query [total_q, H, E], key [total_k, Hk, E], value [total_k, Hk, Ev], cu_seqlens int32 [B + 1] on the
  // device. Returns out [total_q, H, Ev] and lse [H, total_q]; rows outside every sequence are 0 and -inf. The diagonal is per
  // sequence.
  m.def(
      "attention_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? seed=None, *, "
      "SymInt? window_left=None, SymInt? window_right=None, bool bottom_right=True, float? scale=None, float softcap=0.0, "
      "float dropout_p=0.0, bool? deterministic=None) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});

  m.def(
      "attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, bool[4] output_mask, *, SymInt? window_left=None, "
      "SymInt? window_right=None, bool bottom_right=True, float? scale=None, float softcap=0.0, float dropout_p=0.0, "
      "bool? deterministic=None) "
      "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsinks)",
      {at::Tag::pt2_compliant_tag});

  // Few query rows against a long cache of keys and values. query [B, H, L, E]; k_cache [entries, Hk, S, E] and v_cache
  // [entries, Hk, S, Ev] of any strides. Sequence b has keys cache_left_pad[b] to cache_seqlens[b] + appended of entry
  // cache_batch_idx[b] (None: b); under block_table [B, blocks] entries are pages of S keys, and keys S i and following lie in page
  // block_table[b, i]. All of these int32, on the device, never read by the host; without cache_seqlens the cache is full. The
  // diagonal of the window is d = length - L (bottom_right) or 0. No derivative. Returns out [B, H, L, Ev] and lse [B, H, L].
  // rows_first: query, k_cache, v_cache and out have rows (keys) before heads. Views would do, but cost the host some microseconds.
  m.def(
      "attention_decode(Tensor query, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens=None, Tensor? block_table=None, "
      "Tensor? cache_batch_idx=None, Tensor? cache_left_pad=None, Tensor? alibi_slopes=None, Tensor? sinks=None, *, "
      "SymInt appended=0, SymInt? window_left=None, SymInt? window_right=None, bool bottom_right=True, float? scale=None, "
      "float softcap=0.0, bool rows_first=False) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});

  // Writes k_new [B, Hk, L, E] and v_new [B, Hk, L, Ev] into a cache, behind the cache_seqlens[b] keys of each sequence. Rows that
  // the cache has no room for are dropped. rows_first: as in attention_decode, of all four.
  m.def(
      "cache_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor cache_seqlens, "
      "Tensor? block_table=None, Tensor? cache_batch_idx=None, *, bool rows_first=False) -> ()",
      {at::Tag::pt2_compliant_tag});

  // Combines two partial results over disjoint keys: out [..., Ev], lse [...] natural log. (-inf, -inf) stays empty.
  m.def("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
        {at::Tag::pt2_compliant_tag});

  // What dropout keeps under this seed: bool [B, H, L, S]. Not scaled by 1 / (1 - p).
  m.def("dropout_mask(Tensor seed, SymInt[] size, float p) -> Tensor", {at::Tag::pt2_compliant_tag});

  // Which kernel a call of attention_forward (and its backward) runs and why, as text. Runs nothing.
  m.def(
      "explain(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "*, SymInt? window_left=None, SymInt? window_right=None, bool bottom_right=False, float softcap=0.0, "
      "float dropout_p=0.0, bool? deterministic=None) -> str");

  // Whether torch's own SDPA runs on these kernels where it chooses its flash backend; key: "CUDA". See op/takeover.cpp.
  m.def("override_sdpa(str key, bool on) -> ()");
}
