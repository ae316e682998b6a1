// op/backend.cpp: tensors -> Call, the same for every device. Sizes of zero become a call that a kernel can run: a missing head
// dimension is one column of zeros, missing keys are one key that no row sees.
#include "op/backend.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "op/check.h"
#include "op/layout.h"
#include "problem/describe.h"

namespace flash::op {
namespace {

using problem::Array;
using problem::DType;
using problem::kOpen;
using problem::Problem;

int64_t stride_of(const Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

// To be read only: keeps copy-on-write tensors shared.
void* data_of(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

Array array_to_write(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};  // not wanted
  Array a = array_of(t);
  a.data = t.mutable_data_ptr();
  return a;
}

bool is_read_in_place(const Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

// What kernels can read: at least one element, last dimension dense.
Tensor readable(const Tensor& t) {
  if (t.numel() == 0) {  // one row of zeros, seen everywhere
    c10::SmallVector<int64_t, 4> sizes(t.sizes());
    for (int64_t& size : sizes) size = std::max<int64_t>(size, 1);
    return at::zeros({sizes.back()}, t.options()).expand(sizes);
  }
  return dense(t);
}

struct Sizes {
  int64_t batch, heads, kv_heads, rows, keys, head_dim, value_dim;
  bool nothing() const { return batch == 0 || heads == 0 || rows == 0; }  // no row of out
};

Sizes sizes_of(const Inputs& in) {
  const auto q = in.query.sizes(), k = in.key.sizes();
  if (in.packed == nullptr) return {q[0], q[1], k[1], q[2], k[2], q[3], in.value.size(3)};
  const int64_t rows = std::min(in.packed->max_seqlen_q.guard_int(__FILE__, __LINE__), q[0]);
  const int64_t keys = std::min(in.packed->max_seqlen_k.guard_int(__FILE__, __LINE__), k[0]);
  return {in.packed->cu_seqlens_q.size(0) - 1, q[1], k[1], rows, keys, q[2], in.value.size(2)};
}

void set_mask(const Inputs& in, Call& call) {
  const Tensor& mask = call.mask = *in.attn_mask;
  call.problem.mask = {data_of(mask),      dtype_of(mask),     stride_of(mask, 0),
                       stride_of(mask, 1), stride_of(mask, 2), stride_of(mask, 3)};
}

void set_packed(const Inputs& in, Call& call) {
  call.cu_seqlens_q = in.packed->cu_seqlens_q.contiguous();
  call.cu_seqlens_k = in.packed->cu_seqlens_k.contiguous();
  call.problem.cu_seqlens_q = call.cu_seqlens_q.const_data_ptr<int32_t>();
  call.problem.cu_seqlens_k = call.cu_seqlens_k.const_data_ptr<int32_t>();
  call.problem.total_rows = in.query.size(0);
  call.problem.total_keys = in.key.size(0);
}

// Everything but out and lse.
void set_inputs(const Inputs& in, const Options& options, const Sizes& s, Call& call) {
  call.query = readable(in.query);
  call.key = readable(in.key);
  call.value = readable(in.value);
  Problem& p = call.problem;
  p.dtype = dtype_of(in.query);
  p.batch = s.batch;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.rows = s.rows;
  p.keys = s.keys;
  p.head_dim = std::max<int64_t>(s.head_dim, 1);
  p.value_dim = std::max<int64_t>(s.value_dim, 1);
  p.query = array_of(call.query);
  p.key = array_of(call.key);
  p.value = array_of(call.value);
  p.scale = options.scale.value_or(s.head_dim == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(s.head_dim)));
  if (p.dtype == DType::kFloat32 && in.query.is_cuda())
    p.tf32 =
        at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
  p.softcap = options.softcap;
  p.left = window_end(options.window_left);
  p.right = window_end(options.window_right);
  p.bottom_right = options.bottom_right;
  if (in.packed != nullptr) set_packed(in, call);
  if (s.keys == 0) {
    p.keys = 1;
    p.left = p.right = -kOpen;
  } else if (in.attn_mask.has_value()) {
    set_mask(in, call);
  }
  if (in.alibi_slopes.has_value()) {
    call.alibi_slopes = accumulated(in.alibi_slopes, in.query);
    p.alibi_slopes = data_of(call.alibi_slopes);
    p.alibi_batch = call.alibi_slopes.dim() == 2 && call.alibi_slopes.size(0) > 1 ? s.heads : 0;
  }
  if (in.sinks.has_value()) {
    call.sinks = accumulated(in.sinks, in.query);
    p.sinks = data_of(call.sinks);
  }
  p.dropout_p = options.dropout_p;
  if (options.dropout_p > 0.0) {
    call.seed = in.seed->contiguous();
    p.seed = static_cast<const uint64_t*>(call.seed.const_data_ptr());
  }
}

void set_lse(const Tensor& lse, Call& call) {
  call.lse = lse;
  call.problem.lse = data_of(lse);
  const int64_t rows = lse.size(-1);
  call.problem.lse_head = rows;
  call.problem.lse_batch = call.problem.packed() ? 0 : rows * call.problem.heads;
}

// out's sizes and, without the last of them, lse's.
c10::SmallVector<int64_t, 4> out_sizes(const Inputs& in) {
  c10::SmallVector<int64_t, 4> sizes(in.query.sizes());
  sizes.back() = in.value.size(-1);
  return sizes;
}

Tensor empty_lse(const Inputs& in) {
  const auto q = in.query.sizes();
  const auto options = in.query.options().dtype(accumulate_type(in.query));
  return in.packed != nullptr ? at::empty({q[1], q[0]}, options) : at::empty({q[0], q[1], q[2]}, options);
}

// d sinks = - sum over rows of exp(sink - lse) * delta. Rows of lse -inf give nothing: they see nothing, sink included, or lie
// outside every packed sequence, where delta is not even written.
Tensor sinks_gradient(const Call& call, at::ScalarType type) {
  const Tensor weight = at::exp(call.sinks.unsqueeze(-1) - call.lse);
  const Tensor product = weight.mul_(call.delta).neg_().masked_fill_(call.lse.isneginf(), 0.0);
  return (product.dim() == 3 ? product.sum(at::IntArrayRef{0, 2}) : product.sum(1)).to(type);
}

}  // namespace

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBool:
      return DType::kBool;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return DType::kNone;
  }
}

Array array_of(const Tensor& t) {
  if (t.dim() == 3) return {data_of(t), 0, stride_of(t, 1), stride_of(t, 0)};
  return {data_of(t), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

Tensor dense(const Tensor& t) { return is_read_in_place(t) ? t : t.contiguous(); }

Tensor accumulated(const OptTensor& t, const Tensor& query) { return t->to(accumulate_type(query)).contiguous(); }

int64_t window_end(const OptSymInt& end) {
  return end.has_value() ? std::clamp(end->guard_int(__FILE__, __LINE__), -kOpen, kOpen) : kOpen;
}

problem::Choice choice_of_environment() {
  const char* text = std::getenv("FLASH_ATTN_EXT_KERNEL");
  if (text == nullptr || *text == '\0') return problem::Choice::kAny;
  const std::string_view name(text);
  TORCH_CHECK(name == "sm80" || name == "sm90", "FLASH_ATTN_EXT_KERNEL is \"", name, "\": it must be sm80, sm90 or unset.");
  return name == "sm80" ? problem::Choice::kSm80 : problem::Choice::kSm90;
}

void clear_results(const Tensor& out, const Tensor& lse) {
  out.zero_();
  lse.fill_(-std::numeric_limits<double>::infinity());
}

void clear_gradients(const Call& call) {
  for (const Tensor* t : {&call.dquery, &call.dkey, &call.dvalue})
    if (t->defined()) t->zero_();
}

OutLse forward(const Backend& backend, const Inputs& in, const Options& options) {
  check_forward(in, options);
  Tensor out = empty_in_order(in.query, out_sizes(in), in.query.options());
  Tensor lse = empty_lse(in);
  const Sizes sizes = sizes_of(in);
  if (sizes.nothing()) {
    if (in.packed != nullptr) clear_results(out, lse);
    return {out, lse};
  }
  Call call;
  set_inputs(in, options, sizes, call);
  set_lse(lse, call);
  call.out = sizes.value_dim > 0 ? out : readable(out).contiguous();  // without columns, one that nobody reads
  call.problem.out = array_to_write(call.out);
  backend.forward(call);
  return {std::move(out), std::move(lse)};
}

Gradients5 backward(const Backend& backend, const Results& results, const Inputs& in, const Options& options, Wanted wanted) {
  check_backward(results, in, options);
  const Sizes sizes = sizes_of(in);
  const auto gradient = [&](Gradient which, const Tensor& of) {
    if (!wanted[which]) return Tensor();
    Tensor t = empty_in_order(of, of.sizes(), of.options());
    return sizes.nothing() ? t.zero_() : t;
  };
  Call call;
  call.dquery = gradient(kQuery, in.query);
  call.dkey = gradient(kKey, in.key);
  call.dvalue = gradient(kValue, in.value);
  const auto accumulate = in.query.options().dtype(accumulate_type(in.query));
  const bool want_mask = wanted[kMask] && in.attn_mask.has_value() && in.attn_mask->is_floating_point();
  const bool want_sinks = wanted[kSinks] && in.sinks.has_value();
  if (want_mask) call.dmask = at::zeros(in.attn_mask->sizes(), accumulate);
  Tensor dsinks;
  if (sizes.nothing()) {
    if (want_sinks) dsinks = at::zeros_like(*in.sinks);
  } else {
    set_inputs(in, options, sizes, call);
    set_lse(results.lse.contiguous(), call);
    call.out = readable(results.out);
    call.grad_out = readable(results.grad_out);
    call.delta =
        in.packed != nullptr && want_sinks ? at::zeros(call.lse.sizes(), accumulate) : at::empty(call.lse.sizes(), accumulate);
    call.problem.out = array_of(call.out);
    problem::Gradients& g = call.gradients;
    g.dout = array_of(call.grad_out);
    if (results.grad_lse.has_value()) {
      call.grad_lse = results.grad_lse->contiguous();
      g.dlse = data_of(call.grad_lse);
    }
    g.dquery = array_to_write(call.dquery);
    g.dkey = array_to_write(call.dkey);
    g.dvalue = array_to_write(call.dvalue);
    g.delta = call.delta.mutable_data_ptr();
    if (want_mask && call.problem.mask.data != nullptr) {  // without keys there is no mask, and its gradient stays zero
      g.dmask = call.dmask.mutable_data_ptr();
      g.dmask_batch = stride_of(call.dmask, 0);
      g.dmask_head = stride_of(call.dmask, 1);
      g.dmask_row = stride_of(call.dmask, 2);
      g.dmask_key = stride_of(call.dmask, 3);
    }
    g.deterministic = options.deterministic.value_or(at::globalContext().deterministicAlgorithms());
    backend.backward(call);
    if (want_sinks) dsinks = sinks_gradient(call, in.sinks->scalar_type());
  }
  Tensor dmask = want_mask ? call.dmask.to(in.attn_mask->scalar_type()) : Tensor();
  return {std::move(call.dquery), std::move(call.dkey), std::move(call.dvalue), std::move(dmask), std::move(dsinks)};
}

OutLse merge(const Backend& backend, const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  check_merge(out_a, lse_a, out_b, lse_b);
  Tensor out = at::empty(out_a.sizes(), out_a.options());
  if (out.numel() == 0) return {out, at::logaddexp(lse_a, lse_b)};
  Tensor lse = at::empty(lse_a.sizes(), lse_a.options());
  backend.merge(dtype_of(out), lse.numel(), out.size(-1), out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(),
                lse_b.contiguous(), out, lse);
  return {std::move(out), std::move(lse)};
}

Tensor dropout_mask(const Backend& backend, const Tensor& seed, c10::SymIntArrayRef size, double p) {
  Reasons reasons;
  check_seed(seed, reasons);
  check_dropout(p, reasons);
  if (size.size() != 4) reasons.add("size has ", size.size(), " elements: it must be (B, H, L, S).");
  reasons.raise("flash::dropout_mask");
  Tensor keep = at::empty(C10_AS_INTARRAYREF_SLOW(size), seed.options().dtype(at::kBool));
  if (keep.numel() > 0) backend.dropout_mask(seed.contiguous(), p, keep);
  return keep;
}

std::string explain(const Backend& backend, const Inputs& in, const Options& options) {
  const OptTensor seed = options.dropout_p > 0.0 ? at::empty({2}, in.query.options().dtype(at::kDouble)) : OptTensor();
  const Inputs inputs{in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.sinks, seed};
  check_forward(inputs, options);
  const Sizes sizes = sizes_of(inputs);
  if (sizes.nothing()) return "Nothing runs: query has no element.";
  std::string text;
  // A tensor that would be copied is described by the strides of its copy, without making it.
  const auto stand_in = [&](const char* name, const Tensor& t) {
    if (is_read_in_place(t)) return t;
    text += c10::str(name, " is copied first: its last dimension has stride ", t.stride(-1), ", not 1.\n");
    return at::empty(t.sizes(), t.options().device(at::kMeta));
  };
  const Tensor query = stand_in("query", in.query), key = stand_in("key", in.key), value = stand_in("value", in.value);
  Call call;
  set_inputs({query, key, value, in.attn_mask, in.alibi_slopes, in.sinks, seed}, options, sizes, call);
  // Results as the allocator would place them: aligned, never touched.
  const auto result = [](const Tensor& model, at::IntArrayRef of) {
    Array a = array_of(empty_in_order(model, of, model.options().device(at::kMeta)));
    a.data = reinterpret_cast<void*>(uintptr_t{4096});
    return a;
  };
  Problem& p = call.problem;
  p.out = result(in.query, out_sizes(in));
  p.lse = p.out.data;
  p.lse_head = p.rows;
  p.lse_batch = p.rows * p.heads;
  problem::Gradients g;
  g.dout = p.out;
  g.dquery = result(in.query, in.query.sizes());
  g.dkey = result(in.key, in.key.sizes());
  g.dvalue = result(in.value, in.value.sizes());
  g.delta = p.out.data;
  if (p.mask.data != nullptr && in.attn_mask->is_floating_point() && in.attn_mask->requires_grad()) g.dmask = p.out.data;
  g.deterministic = options.deterministic.value_or(at::globalContext().deterministicAlgorithms());
  const problem::Device device = backend.device(in.query);
  const problem::Choice choice = choice_of_environment();
  text += problem::describe(p, nullptr, device, problem::plan(p, nullptr, device, choice));
  if (!text.empty() && text.back() != '\n') text += '\n';
  return text + problem::describe(p, &g, device, problem::plan(p, &g, device, choice));
}

}  // namespace flash::op
