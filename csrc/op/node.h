// op/node.h: what hand-written autograd nodes need. torch::autograd::Function would be shorter but refuses torch.func.
#pragma once
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "op/arguments.h"

namespace flash::op {

// torch <= 2.11 owns nodes by shared_ptr, later ones by intrusive_ptr.
template <class Node>
auto make_node() {
  using torch::autograd::Edge;
  if constexpr (std::is_same_v<decltype(Edge::function), std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node, [](auto* node) { deleteNode(node); });  // unqualified: found only where it exists
  } else {
    return c10::make_intrusive<Node>();
  }
}

inline Tensor value_or_undefined(const OptTensor& t) { return t.value_or(Tensor()); }
inline OptTensor present(Tensor t) { return t.defined() ? OptTensor(std::move(t)) : std::nullopt; }

// Tensors that a node keeps for backward. Results of the node itself must be saved after set_history, so that no cycle of
// ownership arises, and be unpacked with their owner.
class SavedTensors {
 public:
  void reserve(size_t count) { saved_.reserve(count); }
  void input(const Tensor& t) { saved_.emplace_back(t, false); }
  void result(const Tensor& t) {
    if (first_result_ > saved_.size()) first_result_ = saved_.size();
    saved_.emplace_back(t, true);
  }
  template <class Owner>
  Tensor unpack(size_t i, const Owner& owner) const {
    return i < first_result_ ? saved_[i].unpack() : saved_[i].unpack(owner);
  }
  void release() {
    for (auto& s : saved_) s.reset_data();
  }
  void collect(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    for (size_t i = 0; i < saved_.size(); ++i) args.collect(saved_[i], i >= first_result_);
  }
  void before(torch::dynamo::autograd::SwapSavedVariables& swap) {
    for (auto& s : saved_) swap.before(s);
  }
  void after(torch::dynamo::autograd::SwapSavedVariables& swap) {
    for (auto& s : saved_) swap.after(s);
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  size_t first_result_ = ~size_t{0};  // results come last
};

// What a call under `node` gave becomes the node's: its history, and saved for backward.
template <class Owner>
OutLse keep_results(OutLse results, const Owner& node) {
  auto& [out, lse] = results;
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(lse, node);
  node->saved.result(out);
  node->saved.result(lse);
  return results;
}

}  // namespace flash::op
