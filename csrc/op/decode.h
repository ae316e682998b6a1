// op/decode.h: the argument lists of attention_decode and cache_append_, as op/arguments.h has those of attention.
#pragma once
#include "op/arguments.h"

namespace flash::op {

// Where the keys of a sequence lie. References: valid as long as the caller's arguments.
struct CacheInputs {
  const Tensor& key;             // [entries, Hk, S, E]
  const Tensor& value;           // [entries, Hk, S, Ev]
  const OptTensor& seqlens;      // [B] int32, as the three below
  const OptTensor& block_table;  // [B, blocks]
  const OptTensor& batch_index;  // [B]
  const OptTensor& left_pad;     // [B]
};

struct DecodeInputs {
  const Tensor& query;  // [B, H, L, E]
  CacheInputs cache;
  const OptTensor& alibi_slopes;  // [H] or [B, H]
  const OptTensor& sinks;         // [H]
};

struct DecodeOptions {
  c10::SymInt appended;
  OptSymInt window_left, window_right;
  bool bottom_right;
  OptDouble scale;
  double softcap;
  bool rows_first = false;  // dimensions 1 and 2 of query, cache and result are swapped
};

struct AppendInputs {
  CacheInputs cache;
  const Tensor& key;    // [B, Hk, L, E]
  const Tensor& value;  // [B, Hk, L, Ev]
  bool rows_first = false;
};

void check_decode(const DecodeInputs& inputs, const DecodeOptions& options);
void check_append(const AppendInputs& inputs);

OutLse call_decode(const DecodeInputs& inputs, const DecodeOptions& options);  // through the dispatcher
void call_append(const AppendInputs& inputs);

using DecodeKernel = OutLse(const DecodeInputs&, const DecodeOptions&);
using AppendKernel = void(const AppendInputs&);

template <DecodeKernel* kernel>
OutLse flat_decode(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const OptTensor& cache_seqlens,
                   const OptTensor& block_table, const OptTensor& cache_batch_idx, const OptTensor& cache_left_pad,
                   const OptTensor& alibi_slopes, const OptTensor& sinks, c10::SymInt appended, OptSymInt window_left,
                   OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, bool rows_first) {
  return kernel(
      {query, {k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_left_pad}, alibi_slopes, sinks},
      {std::move(appended), std::move(window_left), std::move(window_right), bottom_right, scale, softcap, rows_first});
}

template <AppendKernel* kernel>
void flat_append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_new, const Tensor& v_new,
                 const Tensor& cache_seqlens, const OptTensor& block_table, const OptTensor& cache_batch_idx, bool rows_first) {
  const OptTensor seqlens(cache_seqlens);
  kernel({{k_cache, v_cache, seqlens, block_table, cache_batch_idx, kNoTensor}, k_new, v_new, rows_first});
}

}  // namespace flash::op
