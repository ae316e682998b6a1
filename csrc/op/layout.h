// op/layout.h: the strides of results. One rule for CPU, CUDA and Meta, so that fake and real tensors cannot differ:
// the last dimension is innermost, the others are ordered by the strides of a model tensor (dimensions of stride 0 outermost,
// ties in their own order), and the result is dense. For a dense model this is its own order: [B, L, H, E] data stays that.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/SmallVector.h>

namespace flash::op {

inline bool greater(int64_t a, int64_t b) { return a > b; }
inline bool greater(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_gt(b)); }
inline bool is_zero(int64_t a) { return a == 0; }
inline bool is_zero(const c10::SymInt& a) { return TORCH_GUARD_OR_FALSE(a.sym_eq(0)); }

// Dense strides for `sizes`, in the order of `model`'s strides; both have the same rank, at most 4.
template <class Int>
c10::SmallVector<Int, 4> strides_in_order(c10::ArrayRef<Int> model, c10::ArrayRef<Int> sizes) {
  const size_t last = sizes.size() - 1;
  std::array<size_t, 4> order{};                 // dimensions but the last, innermost first
  const auto inside = [&](size_t a, size_t b) {  // a lies inside b
    if (is_zero(model[a]) || is_zero(model[b])) return is_zero(model[b]) && !is_zero(model[a]);
    return greater(model[b], model[a]);
  };
  for (size_t i = 0; i < last; ++i) {  // insertion, from the last dimension backwards: ties keep their own order
    const size_t dim = last - 1 - i;
    size_t place = i;
    for (; place > 0 && inside(dim, order[place - 1]); --place) order[place] = order[place - 1];
    order[place] = dim;
  }
  c10::SmallVector<Int, 4> strides(sizes.size(), Int(1));
  Int step = sizes[last];
  const auto at_least_one = [](const Int& size) { return is_zero(size) ? Int(1) : size; };  // as torch's own empty tensors
  step = at_least_one(step);
  for (size_t i = 0; i < last; ++i) {
    strides[order[i]] = step;
    step = step * at_least_one(sizes[order[i]]);
  }
  return strides;
}

inline at::Tensor empty_in_order(const at::Tensor& model, at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_strided(sizes, strides_in_order<int64_t>(model.strides(), sizes), options);
}

inline at::Tensor empty_in_order(const at::Tensor& model, at::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty_strided_symint(sizes, strides_in_order<c10::SymInt>(model.sym_strides(), sizes), options);
}

}  // namespace flash::op
