// op/backend.h: everything that the CPU and the CUDA key share: check, copy what a kernel cannot read, allocate, fill a
// Problem, handle empty sizes, reduce the gradient of the sinks. A device adds a Backend (how to run a Problem) and one line:
//   TORCH_LIBRARY_IMPL(flash, CUDA, m) { register_backend<kCuda>(m); }
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "op/arguments.h"
#include "op/decode.h"
#include "problem/decode.h"
#include "problem/plan.h"
#include "problem/problem.h"

namespace flash::op {

// One call, ready to run. The tensors own what `problem` and `gradients` point to; a backend that has to copy an operand once
// more (alignment) replaces the tensor here and the Array with it. All memory is on query's device.
struct Call {
  problem::Problem problem;
  problem::Gradients gradients;                                        // backward only
  Tensor query, key, value;                                            // never of zero elements; last dimension dense
  Tensor out, lse;                                                     // lse contiguous
  Tensor mask, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k;  // undefined where absent
  Tensor grad_out, grad_lse, delta;                                    // backward only
  Tensor dquery, dkey, dvalue;                                         // undefined where not wanted
  Tensor dmask;                                                        // accumulate type, contiguous, zero: backward adds to it
};

// How a device runs things. Called with every size at least 1 (rows, keys, heads, both head dims; only total_keys may be 0).
// What is to be written arrives uninitialised: forward and backward clear what of packed results no sequence holds, by clear_results()
// and clear_gradients() if they have no better way. Failures are raised with TORCH_CHECK.
// The device guard, the stream and the workspace are the backend's matter.
struct Backend {
  problem::Device (*device)(const Tensor& query);  // what plan() should know about query's device
  void (*forward)(Call& call);                     // writes problem.out, problem.lse
  void (*backward)(Call& call);                    // writes what gradients asks for, and gradients.delta
  // Contiguous out [count, value_dim] and lse [count], results allocated.
  void (*merge)(problem::DType dtype, int64_t count, int64_t value_dim, const Tensor& out_a, const Tensor& lse_a,
                const Tensor& out_b, const Tensor& lse_b, const Tensor& out, const Tensor& lse);
  // seed [2] float64, keep [batch, heads, rows, keys] bool, both contiguous and on one device.
  void (*dropout_mask)(const Tensor& seed, double p, const Tensor& keep);
  void (*decode)(const problem::Decode& decode, const Tensor& query);  // writes problem.out, problem.lse
  void (*append)(const problem::Append& append, const Tensor& cache);
};

problem::DType dtype_of(const Tensor& tensor);  // kNone: not one of ours

// [batch, heads, rows, dim] or packed [total, heads, dim], to be read.
problem::Array array_of(const Tensor& tensor);
Tensor dense(const Tensor& tensor);  // with a dense last dimension: copied only where it is not

// Slopes or sinks, which are there, as kernels read them.
Tensor accumulated(const OptTensor& tensor, const Tensor& query);

// An end of a window; none is open.
int64_t window_end(const OptSymInt& end);

// out = 0, lse = -inf: what rows hold that see no key.
void clear_results(const Tensor& out, const Tensor& lse);
void clear_gradients(const Call& call);  // dquery, dkey, dvalue

// FLASH_ATTN_EXT_KERNEL: unset or empty, "sm80" or "sm90".
problem::Choice choice_of_environment();

OutLse forward(const Backend& backend, const Inputs& inputs, const Options& options);
Gradients5 backward(const Backend& backend, const Results& results, const Inputs& inputs, const Options& options,
                    Wanted wanted);
OutLse merge(const Backend& backend, const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);
Tensor dropout_mask(const Backend& backend, const Tensor& seed, c10::SymIntArrayRef size, double p);
OutLse decode(const Backend& backend, const DecodeInputs& inputs, const DecodeOptions& options);
void append(const Backend& backend, const AppendInputs& inputs);
std::string explain(const Backend& backend, const Inputs& inputs, const Options& options);

// The kernels of one key.
template <const Backend& backend>
struct Kernels {
  static OutLse forward(const Inputs& inputs, const Options& options) { return op::forward(backend, inputs, options); }
  static Gradients5 backward(const Results& results, const Inputs& inputs, const Options& options, Wanted wanted) {
    return op::backward(backend, results, inputs, options, wanted);
  }
  static OutLse merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
    return op::merge(backend, out_a, lse_a, out_b, lse_b);
  }
  static Tensor dropout_mask(const Tensor& seed, c10::SymIntArrayRef size, double p) {
    return op::dropout_mask(backend, seed, size, p);
  }
  static OutLse decode(const DecodeInputs& inputs, const DecodeOptions& options) {
    return op::decode(backend, inputs, options);
  }
  static void append(const AppendInputs& inputs) { op::append(backend, inputs); }
  static std::string explain(const Inputs& inputs, const Options& options) { return op::explain(backend, inputs, options); }
};

template <const Backend& backend>
void register_backend(torch::Library& m) {
  using Key = Kernels<backend>;
  m.impl("attention_forward", TORCH_FN(flat_forward<Key::forward>));
  m.impl("attention_backward", TORCH_FN(flat_backward<Key::backward>));
  m.impl("attention_varlen_forward", TORCH_FN(flat_varlen_forward<Key::forward>));
  m.impl("attention_varlen_backward", TORCH_FN(flat_varlen_backward<Key::backward>));
  m.impl("merge", TORCH_FN(Key::merge));
  m.impl("dropout_mask", TORCH_FN(Key::dropout_mask));
  m.impl("attention_decode", TORCH_FN(flat_decode<Key::decode>));
  m.impl("cache_append_", TORCH_FN(flat_append<Key::append>));
  m.impl("explain", TORCH_FN(flat_explain<Key::explain>));
}

}  // namespace flash::op
