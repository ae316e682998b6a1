// op/rows_first.cpp: views around attention_forward and attention_backward. Made here, and below autograd, because as views with
// derivatives of their own they cost the host more than the attention between them.
#include "op/rows_first.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "op/layout.h"

namespace flash::op {
namespace {

using Gradients3 = std::tuple<Tensor, Tensor, Tensor>;

Gradients3 flat_rows_first_backward(const Tensor& grad_out, const OptTensor& grad_lse, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& out, const Tensor& lse, OptSymInt window_left,
                                    OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap,
                                    bool heads_first_in, OptBool deterministic) {
  auto [dquery, dkey, dvalue, dmask, dsinks] =
      rows_first_backward({grad_out, grad_lse, out, lse}, {query, key, value, kNoTensor, kNoTensor, kNoTensor, kNoTensor},
                          {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, 0.0, deterministic},
                          {true, true, true, false, false}, heads_first_in);
  return {std::move(dquery), std::move(dkey), std::move(dvalue)};
}

// grad_out is not looked at, as in the fake attention_backward.
Gradients3 meta(const Tensor&, const OptTensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                const Tensor&, OptSymInt, OptSymInt, bool, OptDouble, double, bool, OptBool) {
  const auto like = [](const Tensor& t) { return empty_in_order(t, t.sym_sizes(), t.options()); };
  return {like(query), like(key), like(value)};
}

}  // namespace

Tensor swapped(const Tensor& t) {
  if (t.dim() != 4) return t;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;  // where nothing is differentiated
  if (!at::GradMode::is_enabled()) below.emplace();
  return t.transpose(1, 2);
}

OutLse rows_first(const Tensor& query, const Tensor& key, const Tensor& value, OptSymInt window_left, OptSymInt window_right,
                  bool bottom_right, OptDouble scale, double softcap, bool heads_first_in, OptBool deterministic) {
  TORCH_CHECK(
      query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "flash::attention_rows_first: query, key and value have ",
      query.dim(), ", ", key.dim(), " and ", value.dim(), " dimensions: they must be ",
      heads_first_in ? "[B, H, L, E], [B, Hk, S, E] and [B, Hk, S, Ev]." : "[B, L, H, E], [B, S, Hk, E] and [B, S, Hk, Ev].");
  const auto heads_first = [&](const Tensor& t) { return heads_first_in ? t : swapped(t); };
  const Tensor q = heads_first(query), k = heads_first(key), v = heads_first(value);
  auto [out, lse] =
      call_forward({q, k, v, kNoTensor, kNoTensor, kNoTensor, kNoTensor},
                   {std::move(window_left), std::move(window_right), bottom_right, scale, softcap, 0.0, deterministic});
  return {swapped(out), std::move(lse)};
}

OutLse call_rows_first(const Tensor& query, const Tensor& key, const Tensor& value, OptSymInt window_left,
                       OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, bool heads_first_in,
                       OptBool deterministic) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash::attention_rows_first", "").typed<decltype(rows_first)>();
  return op.call(query, key, value, std::move(window_left), std::move(window_right), bottom_right, scale, softcap,
                 heads_first_in, deterministic);
}

Gradients5 rows_first_backward(const Results& results, const Inputs& in, const Options& options, Wanted wanted,
                               bool heads_first_in) {
  const auto heads_first = [&](const Tensor& t) { return heads_first_in ? t : swapped(t); };
  const Tensor grad_out = swapped(results.grad_out), out = swapped(results.out);
  const Tensor q = heads_first(in.query), k = heads_first(in.key), v = heads_first(in.value);
  Gradients5 gradients = call_backward({grad_out, results.grad_lse, out, results.lse},
                                       {q, k, v, kNoTensor, kNoTensor, kNoTensor, kNoTensor}, options, wanted);
  for (const Gradient which : {kQuery, kKey, kValue}) {
    if (gradients[which].defined()) gradients[which] = heads_first(gradients[which]);
  }
  return gradients;
}

Gradients5 call_rows_first_backward(const Results& results, const Inputs& in, const Options& o, bool heads_first_in) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flash::attention_rows_first_backward", "")
                             .typed<decltype(flat_rows_first_backward)>();
  auto [dquery, dkey, dvalue] =
      op.call(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out, results.lse, o.window_left,
              o.window_right, o.bottom_right, o.scale, o.softcap, heads_first_in, o.deterministic);
  return {std::move(dquery), std::move(dkey), std::move(dvalue), Tensor(), Tensor()};
}

}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, CompositeImplicitAutograd, m) { m.impl("attention_rows_first", TORCH_FN(flash::op::rows_first)); }

// vmap decomposes composites of torch itself only; a custom one has to say so.
TORCH_LIBRARY_IMPL(flash, FuncTorchBatchedDecomposition, m) { m.impl("attention_rows_first", TORCH_FN(flash::op::rows_first)); }

TORCH_LIBRARY_IMPL(flash, CompositeExplicitAutograd, m) {
  m.impl("attention_rows_first_backward", TORCH_FN(flash::op::flat_rows_first_backward));
}

TORCH_LIBRARY_IMPL(flash, Meta, m) { m.impl("attention_rows_first_backward", TORCH_FN(flash::op::meta)); }
