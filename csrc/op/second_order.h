// op/second_order.h: the derivative of attention_backward, as a composite of at:: operators (itself differentiable).
// It holds whole score matrices: memory O(L S), unlike everything else here. Plain training never comes here.
#pragma once
#include "op/arguments.h"

namespace flash::op {

// What flows into the five results of attention_backward, and what flows out to its arguments. Undefined: zero, or not wanted.
struct SecondOrder {
  Tensor grad_out, grad_lse, query, key, value, out, lse, attn_mask, sinks;
};

SecondOrder second_order(const Gradients5& incoming, const Results& results, const Inputs& inputs, const Options& options);

}  // namespace flash::op
