// op/autograd.cpp: the derivatives, for every device: attention_forward's is attention_backward, whose own derivative is a
// composite (second_order.h). Dense and packed attention share the nodes; packed attention has no second derivative.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "op/node.h"
#include "op/rows_first.h"
#include "op/second_order.h"

namespace flash::op {
namespace {

using namespace torch::autograd;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// What both nodes keep.
struct AttentionNode : Node {
  enum Slot { kQ, kK, kV, kAttnMask, kAlibi, kSink, kSeed, kCuQ, kCuK, kOut, kLse, kGradOut, kGradLse, kSlots };

  SavedTensors saved;
  bool is_packed = false;
  c10::SymInt max_seqlen_q = 0, max_seqlen_k = 0;
  Options options;

  void save_inputs(const Inputs& in, const Options& o) {
    saved.reserve(kSlots);
    for (const Tensor* t : {&in.query, &in.key, &in.value}) saved.input(*t);
    for (const OptTensor* t : {&in.attn_mask, &in.alibi_slopes, &in.sinks, &in.seed}) saved.input(value_or_undefined(*t));
    is_packed = in.packed != nullptr;
    saved.input(is_packed ? in.packed->cu_seqlens_q : Tensor());
    saved.input(is_packed ? in.packed->cu_seqlens_k : Tensor());
    if (is_packed) {
      max_seqlen_q = in.packed->max_seqlen_q;
      max_seqlen_k = in.packed->max_seqlen_k;
    }
    options = o;
  }

  OwnedCall unpack() {
    const auto owner = getptr();
    const auto get = [&](Slot slot) { return saved.unpack(slot, owner); };
    OwnedCall c{get(kQ),
                get(kK),
                get(kV),
                present(get(kAttnMask)),
                present(get(kAlibi)),
                present(get(kSink)),
                present(get(kSeed)),
                {},
                {},
                {},
                get(kOut),
                get(kLse)};
    if (is_packed) c.packed = Packed{get(kCuQ), get(kCuK), max_seqlen_q, max_seqlen_k};
    return c;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }
};

// Of attention_forward, and of attention_rows_first: its result, and its inputs unless heads_first_in, have rows first.
struct FlashAttentionBackward final : AttentionNode {
  bool rows_first = false, heads_first_in = false, is_traced = false;

  std::string name() const override { return "FlashAttentionBackward"; }

  variable_list apply(variable_list&& grads) override {  // gradients of out and lse -> of query, key, value, mask, sinks
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(5);
    OwnedCall call = unpack();
    call.grad_out = grads[0].defined() ? grads[0] : at::zeros_like(call.out);
    call.grad_lse = present(grads[1]);
    Wanted wanted;
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    auto [dquery, dkey, dvalue, dmask, dsinks] = run(call, wanted);
    return {dquery, dkey, dvalue, dmask, dsinks};
  }

  // Compiled autograd: what its cache key is made of, and a run of apply with traced tensors in place of the saved ones. Only
  // here, because it hands in gradients of unknown sizes: they must go into one operator, unread.
  void compiled_args(CompiledNodeArgs& args) const override {
    saved.collect(args);
    args.collect(is_packed);
    args.collect(max_seqlen_q);
    args.collect(max_seqlen_k);
    args.collect(options.window_left);
    args.collect(options.window_right);
    args.collect(options.bottom_right);
    args.collect(options.scale);
    args.collect(options.softcap);
    args.collect(options.dropout_p);
    args.collect(options.deterministic);
    args.collect(rows_first);
    args.collect(heads_first_in);
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    saved.before(swap);
    swap.before(max_seqlen_q);
    swap.before(max_seqlen_k);
    swap.before(options.window_left);
    swap.before(options.window_right);
    is_traced = true;
    variable_list result = apply(variable_list(grads));
    is_traced = false;
    saved.after(swap);
    swap.after(max_seqlen_q);
    swap.after(max_seqlen_k);
    swap.after(options.window_left);
    swap.after(options.window_right);
    return result;
  }

 private:
  Gradients5 run(const OwnedCall& call, Wanted wanted) const {
    if (!rows_first) return call_backward(call.results(), call.inputs(), options, wanted);
    if (is_traced) return call_rows_first_backward(call.results(), call.inputs(), options, heads_first_in);
    return rows_first_backward(call.results(), call.inputs(), options, wanted, heads_first_in);
  }
};

struct FlashAttentionBackwardBackward final : AttentionNode {
  std::string name() const override { return "FlashAttentionBackwardBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_NOT_IMPLEMENTED(!is_packed,
                                "flash::attention_varlen has no second derivative: use flash::attention on padded sequences "
                                "with a mask.");
    OwnedCall call = unpack();
    call.grad_out = saved.unpack(kGradOut, getptr());
    call.grad_lse = present(saved.unpack(kGradLse, getptr()));
    SecondOrder d = second_order({grads[0], grads[1], grads[2], grads[3], grads[4]}, call.results(), call.inputs(), options);
    return {d.grad_out, d.grad_lse, d.query, d.key, d.value, d.out, d.lse, d.attn_mask, d.sinks};
  }
};

template <class... Tensors>
void refuse_forward_mode(const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(isFwGradDefined(tensors) || ...),
                              "flash::attention has no forward-mode derivative (jvp, jacfwd): use reverse mode (vjp, jacrev).");
}

void refuse_slopes_gradient(const OptTensor& slopes) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !compute_requires_grad(slopes),
      "flash::attention has no gradient for alibi_slopes: pass alibi_slopes.detach(), or learn the bias "
      "as a float attn_mask.");
}

// run() is the call without autograd, initialise(node) says what else the node must know.
template <class Run, class Initialise>
OutLse differentiable(const Inputs& in, const Options& options, const Run& run, const Initialise& initialise) {
  refuse_forward_mode(in.query, in.key, in.value, in.attn_mask, in.sinks);
  refuse_slopes_gradient(in.alibi_slopes);
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return run();
  };
  if (!compute_requires_grad(in.query, in.key, in.value, in.attn_mask, in.sinks)) return below();
  auto node = make_node<FlashAttentionBackward>();
  node->set_next_edges(collect_next_edges(in.query, in.key, in.value, in.attn_mask, in.sinks));
  node->save_inputs(in, options);
  initialise(*node);
  return keep_results(below(), node);
}

OutLse forward(const Inputs& in, const Options& options) {
  return differentiable(in, options, [&] { return call_forward(in, options); }, [](FlashAttentionBackward&) {});
}

OutLse differentiable_rows_first(const Tensor& query, const Tensor& key, const Tensor& value, OptSymInt window_left,
                                 OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap,
                                 bool heads_first_in, OptBool deterministic) {
  const auto run = [&] {
    return rows_first(query, key, value, window_left, window_right, bottom_right, scale, softcap, heads_first_in,
                      deterministic);
  };
  return differentiable({query, key, value, kNoTensor, kNoTensor, kNoTensor, kNoTensor},
                        {window_left, window_right, bottom_right, scale, softcap, 0.0, deterministic}, run,
                        [&](FlashAttentionBackward& node) {
                          node.rows_first = true;
                          node.heads_first_in = heads_first_in;
                        });
}

Gradients5 backward(const Results& results, const Inputs& in, const Options& options, Wanted wanted) {
  refuse_forward_mode(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out, results.lse, in.attn_mask,
                      in.sinks);
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_backward(results, in, options, wanted);
  };
  if (!compute_requires_grad(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out, results.lse,
                             in.attn_mask, in.sinks)) {
    return below();
  }
  auto node = make_node<FlashAttentionBackwardBackward>();
  node->set_next_edges(collect_next_edges(results.grad_out, results.grad_lse, in.query, in.key, in.value, results.out,
                                          results.lse, in.attn_mask, in.sinks));
  node->save_inputs(in, options);
  for (const Tensor& t : {results.out, results.lse, results.grad_out}) node->saved.input(t);
  node->saved.input(value_or_undefined(results.grad_lse));
  Gradients5 gradients = below();
  for (Tensor& gradient : gradients) set_history(gradient, node);
  return gradients;
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, Autograd, m) {
  using namespace flash::op;
  m.impl("attention_forward", TORCH_FN(flat_forward<forward>));
  m.impl("attention_backward", TORCH_FN(flat_backward<backward>));
  m.impl("attention_varlen_forward", TORCH_FN(flat_varlen_forward<forward>));
  m.impl("attention_varlen_backward", TORCH_FN(flat_varlen_backward<backward>));
  m.impl("dropout_mask", torch::CppFunction::makeFallthrough());
  m.impl("explain", torch::CppFunction::makeFallthrough());
}

// Without these the composite's views would be recorded one by one.
TORCH_LIBRARY_IMPL(flash, AutogradCPU, m) { m.impl("attention_rows_first", TORCH_FN(flash::op::differentiable_rows_first)); }
TORCH_LIBRARY_IMPL(flash, AutogradCUDA, m) { m.impl("attention_rows_first", TORCH_FN(flash::op::differentiable_rows_first)); }
