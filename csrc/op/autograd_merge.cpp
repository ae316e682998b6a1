// op/autograd_merge.cpp: the derivative of merge, a composite that is itself differentiable. With wa = exp(lse_a - lse):
// out = wa out_a + wb out_b, so d out_a = wa g and d lse_a = wa (rowsum(g o (out_a - out)) + dlse). An empty part has wa = 0.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <limits>

#include "op/node.h"

namespace flash::op {
namespace {

using namespace torch::autograd;

struct FlashMergeBackward final : Node {
  SavedTensors saved;  // out_a, lse_a, out_b, lse_b, out, lse

  std::string name() const override { return "FlashMergeBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(4);
    const auto owner = getptr();
    const Tensor lse = saved.unpack(5, owner);
    const Tensor out = saved.unpack(4, owner).to(lse.scalar_type());
    const Tensor g = grads[0].defined() ? grads[0].to(lse.scalar_type()) : Tensor();
    variable_list result(4);
    for (const size_t part : {0, 2}) {
      const Tensor part_out = saved.unpack(part, owner), part_lse = saved.unpack(part + 1, owner);
      const Tensor empty = part_lse.isneginf();
      const Tensor weight = at::exp(at::where(empty, -std::numeric_limits<double>::infinity(), part_lse - lse));
      Tensor inner = grads[1];
      if (g.defined()) {
        result[part] = (weight.unsqueeze(-1) * g).to(part_out.scalar_type());
        const Tensor sum = (g * (part_out.to(lse.scalar_type()) - out)).sum(-1);
        inner = inner.defined() ? inner + sum : sum;
      }
      result[part + 1] = at::where(empty, 0.0, weight * inner);
    }
    return result;
  }
};

OutLse merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(isFwGradDefined(out_a) || isFwGradDefined(lse_a) || isFwGradDefined(out_b) || isFwGradDefined(lse_b)),
      "flash::merge has no forward-mode derivative (jvp, jacfwd): use reverse mode (vjp, jacrev).");
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_merge(out_a, lse_a, out_b, lse_b);
  };
  if (!compute_requires_grad(out_a, lse_a, out_b, lse_b)) return below();
  auto node = make_node<FlashMergeBackward>();
  node->set_next_edges(collect_next_edges(out_a, lse_a, out_b, lse_b));
  node->saved.reserve(6);
  for (const Tensor& t : {out_a, lse_a, out_b, lse_b}) node->saved.input(t);
  return keep_results(below(), node);
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, Autograd, m) { m.impl("merge", TORCH_FN(flash::op::merge)); }
