// op/takeover.cpp: torch's own SDPA on these kernels: other kernels for the four operators of its flash backend, registered and
// removed at run time. flash_attn_ext/_takeover.py asks for that and knows which schemas are like those below.
// What these operators cannot pass on (dropout, whose random state is torch's own; the debug mask; used lengths; pages) still runs
// torch's kernels. At this level is_causal is aligned to the bottom right, lse is natural and fp32, and backward may be given the
// out and lse of a whole ring (torch's context parallel does).
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "op/arguments.h"
#include "op/rows_first.h"

namespace flash::op {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Values = c10::ArrayRef<IValue>;  // the arguments of a call, by place

bool takes(const Tensor& query, double dropout_p) {
  const at::ScalarType type = query.scalar_type();
  return dropout_p == 0.0 && (type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble);
}

OptSymInt window_end(const IValue& end) {  // none and any negative number are open ends
  if (end.isNone()) return std::nullopt;
  c10::SymInt keys = end.toSymInt();
  return keys < 0 ? std::nullopt : OptSymInt(std::move(keys));
}

Options options_of(bool is_causal, const IValue& scale) {
  Options options;
  if (is_causal) options.window_right = 0;
  options.bottom_right = true;
  options.scale = scale.toOptional<double>();
  return options;
}

Options options_of(bool is_causal, const IValue& scale, const IValue& window_left, const IValue& window_right) {
  Options options = options_of(is_causal, scale);
  options.window_left = window_end(window_left);
  if (!is_causal) options.window_right = window_end(window_right);
  return options;
}

// rng_state, unused and debug_attn_mask of a call without dropout, which nobody reads: not filled, that would be two launches.
void push_states(const Tensor& query, Stack& results) {
  const auto words = query.options().dtype(at::kUInt64);
  torch::jit::push(results, at::empty({2}, words), at::empty({}, words), at::empty({0}, query.options()));
}

// The operators. Each returns false, and leaves `results` alone, if the call is not for this library.
using Operator = bool(Values in, Stack& results);

// _scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask, *, scale):
// tensors [B, H, L, E]; returns out, lse, cum_seq_q, cum_seq_k, max_q, max_k and the states.
bool sdpa_forward(Values in, Stack& results) {
  const Tensor &query = in[0].toTensor(), &key = in[1].toTensor(), &value = in[2].toTensor();
  if (!takes(query, in[3].toDouble()) || in[5].toBool()) return false;
  auto [out, lse] =
      call_forward({query, key, value, kNoTensor, kNoTensor, kNoTensor, kNoTensor}, options_of(in[4].toBool(), in[6]));
  torch::jit::push(results, std::move(out), std::move(lse), Tensor(), Tensor(), query.size(2), key.size(2));
  push_states(query, results);
  return true;
}

void push_gradients(Gradients5&& gradients, Stack& results) {
  torch::jit::push(results, std::move(gradients[kQuery]), std::move(gradients[kKey]), std::move(gradients[kValue]));
}

constexpr Wanted kGradients{true, true, true, false, false};

// _scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
// dropout_p, is_causal, philox_seed, philox_offset, *, scale).
bool sdpa_backward(Values in, Stack& results) {
  const Tensor& query = in[1].toTensor();
  if (!takes(query, in[10].toDouble())) return false;
  push_gradients(call_backward({in[0].toTensor(), kNoTensor, in[4].toTensor(), in[5].toTensor()},
                               {query, in[2].toTensor(), in[3].toTensor(), kNoTensor, kNoTensor, kNoTensor, kNoTensor},
                               options_of(in[11].toBool(), in[14]), kGradients),
                 results);
  return true;
}

Packed packed_of(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const IValue& max_q, const IValue& max_k) {
  return {cu_seqlens_q, cu_seqlens_k, max_q.toSymInt(), max_k.toSymInt()};
}

// _flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
// window_size_left, window_size_right, seqused_k, alibi_slopes, ...): tensors [B, L, H, E], packed [total, H, E]. What follows in
// newer releases is block_table, which is torch's, and num_splits, which is the kernels' own matter here.
bool flash_forward(Values in, Stack& results) {
  const Tensor& query = in[0].toTensor();
  const bool pages = in.size() > 15 && !in[15].isNone();
  if (!takes(query, in[7].toDouble()) || in[9].toBool() || !in[13].isNone() || pages) return false;
  const Options options = options_of(in[8].toBool(), in[10], in[11], in[12]);
  const OptTensor slopes = in[14].toOptional<Tensor>();
  if (in[3].isNone()) {
    const Tensor q = swapped(query), k = swapped(in[1].toTensor()), v = swapped(in[2].toTensor());
    auto [out, lse] = call_forward({q, k, v, kNoTensor, slopes, kNoTensor, kNoTensor}, options);
    torch::jit::push(results, swapped(out), std::move(lse));
  } else {
    const Packed packed = packed_of(in[3].toTensor(), in[4].toTensor(), in[5], in[6]);
    auto [out, lse] =
        call_forward({query, in[1].toTensor(), in[2].toTensor(), kNoTensor, slopes, kNoTensor, kNoTensor, &packed}, options);
    torch::jit::push(results, std::move(out), std::move(lse));
  }
  push_states(query, results);
  return true;
}

// _flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
// rng_state, unused, *, scale, window_size_left, window_size_right).
bool flash_backward(Values in, Stack& results) {
  const Tensor &query = in[1].toTensor(), &lse = in[5].toTensor(), &cu_seqlens_q = in[6].toTensor();
  if (!takes(query, in[10].toDouble())) return false;
  const Options options = options_of(in[11].toBool(), in[14], in[15], in[16]);
  if (cu_seqlens_q.defined() && cu_seqlens_q.numel() > 0) {
    const Packed packed = packed_of(cu_seqlens_q, in[7].toTensor(), in[8], in[9]);
    push_gradients(
        call_backward({in[0].toTensor(), kNoTensor, in[4].toTensor(), lse},
                      {query, in[2].toTensor(), in[3].toTensor(), kNoTensor, kNoTensor, kNoTensor, kNoTensor, &packed}, options,
                      kGradients),
        results);
    return true;
  }
  push_gradients(rows_first_backward({in[0].toTensor(), kNoTensor, in[4].toTensor(), lse},
                                     {query, in[2].toTensor(), in[3].toTensor(), kNoTensor, kNoTensor, kNoTensor, kNoTensor},
                                     options, kGradients, false),
                 results);
  return true;
}

// The kernel of one operator and one key: ours, or the one that was there before. Boxed, so that what a release appends to a
// schema passes through.
class Override final : public c10::OperatorKernel {
 public:
  Override(Operator* ours, std::optional<c10::SafeKernelFunction> theirs) : ours_(ours), theirs_(std::move(theirs)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    Stack results;
    results.reserve(op.schema().returns().size());
    if (!ours_(torch::jit::last(*stack, count), results)) {
      TORCH_CHECK_NOT_IMPLEMENTED(theirs_.has_value(), op.schema().name(),
                                  " has no other kernel here, and flash_attn_ext does not take this call.");
      return theirs_->callBoxed(op, keys, stack);
    }
    torch::jit::drop(*stack, count);
    for (IValue& result : results) stack->push_back(std::move(result));
  }

 private:
  Operator* ours_;
  std::optional<c10::SafeKernelFunction> theirs_;
};

struct Unheard final : c10::WarningHandler {  // that kernels are overridden is what the caller asked for
  void process(const c10::Warning&) override {}
};

void override(torch::Library& library, const char* name, c10::DispatchKey key, Operator* ours) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  std::optional<c10::SafeKernelFunction> theirs;
  if (op.hasKernelForDispatchKey(key)) theirs = op.getComputedKernelForDispatchKey(key);
  library.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Override>(ours, std::move(theirs))));
}

// key: a device's. While on, torch's flash backend is this library on that device. Python calls operators without its lock.
void override_sdpa(std::string_view key, bool on) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  static auto& libraries =
      *new std::map<c10::DispatchKey, std::unique_ptr<torch::Library>>;  // never destroyed: outlives torch's
  const c10::DispatchKey device = c10::parseDispatchKey(std::string(key));
  if (!on) {
    libraries.erase(device);
    return;
  }
  auto& library = libraries[device];
  if (library != nullptr) return;
  Unheard unheard;
  const c10::WarningUtils::WarningHandlerGuard guard(&unheard);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", device, __FILE__, __LINE__);
  override(*library, "aten::_scaled_dot_product_flash_attention", device, sdpa_forward);
  override(*library, "aten::_scaled_dot_product_flash_attention_backward", device, sdpa_backward);
  override(*library, "aten::_flash_attention_forward", device, flash_forward);
  override(*library, "aten::_flash_attention_backward", device, flash_backward);
}

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, CompositeExplicitAutograd, m) { m.impl("override_sdpa", TORCH_FN(flash::op::override_sdpa)); }
