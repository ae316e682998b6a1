// op/meta.cpp: shapes, dtypes and strides without data. This is the fake kernel of torch.compile and torch.export.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "op/arguments.h"
#include "op/check.h"
#include "op/layout.h"

namespace flash::op {
namespace {

OutLse forward(const Inputs& in, const Options& options) {
  check_forward(in, options);
  const auto q = in.query.sym_sizes();
  c10::SymDimVector out(q.begin(), q.end());
  out.back() = in.value.sym_size(-1);
  const auto accumulate = in.query.options().dtype(accumulate_type(in.query));
  Tensor lse =
      in.packed != nullptr ? at::empty_symint({q[1], q[0]}, accumulate) : at::empty_symint({q[0], q[1], q[2]}, accumulate);
  return {empty_in_order(in.query, out, in.query.options()), std::move(lse)};
}

// grad_out is not looked at: compiled autograd traces with stand-ins of false sizes.
Gradients5 backward(const Results&, const Inputs& in, const Options& options, Wanted wanted) {
  check_forward(in, options);
  const auto like = [&](Gradient which, const Tensor& t) {
    return wanted[which] ? empty_in_order(t, t.sym_sizes(), t.options()) : Tensor();
  };
  const auto contiguous = [&](Gradient which, const OptTensor& t) {
    return wanted[which] && t.has_value() && t->is_floating_point() ? at::empty_symint(t->sym_sizes(), t->options()) : Tensor();
  };
  return {like(kQuery, in.query), like(kKey, in.key), like(kValue, in.value), contiguous(kMask, in.attn_mask),
          contiguous(kSinks, in.sinks)};
}

OutLse merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  check_merge(out_a, lse_a, out_b, lse_b);
  return {at::empty_symint(out_a.sym_sizes(), out_a.options()), at::empty_symint(lse_a.sym_sizes(), lse_a.options())};
}

Tensor dropout_mask(const Tensor& seed, c10::SymIntArrayRef size, double) {
  return at::empty_symint(size, seed.options().dtype(at::kBool));
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, Meta, m) {
  using namespace flash::op;
  m.impl("attention_forward", TORCH_FN(flat_forward<forward>));
  m.impl("attention_backward", TORCH_FN(flat_backward<backward>));
  m.impl("attention_varlen_forward", TORCH_FN(flat_varlen_forward<forward>));
  m.impl("attention_varlen_backward", TORCH_FN(flat_varlen_backward<backward>));
  m.impl("merge", TORCH_FN(merge));
  m.impl("dropout_mask", TORCH_FN(dropout_mask));
}
