// op/autocast.cpp: inside torch.autocast query, key, value and a float mask are cast to its dtype, as for SDPA. fp64 and bool
// stay; slopes, sinks and seed have types of their own. attention_forward has the rule too, because flash_attn_ext.attention
// calls it directly for options that SDPA does not have; backward has none: it runs on what forward saved, and autograd casts
// gradients back.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "op/arguments.h"
#include "op/rows_first.h"

namespace flash::op {
namespace {

template <c10::DeviceType device>
struct Autocast {
  template <class T>
  static T cast(const T& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
  }

  static c10::DispatchKey key() { return at::autocast::get_autocast_dispatch_key_from_device_type(device); }

  static OutLse forward(const Inputs& in, const Options& options) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key());
    const Tensor query = cast(in.query), k = cast(in.key), value = cast(in.value);
    const OptTensor mask = cast(in.attn_mask);
    return call_forward({query, k, value, mask, in.alibi_slopes, in.sinks, in.seed, in.packed}, options);
  }

  static Tensor attention(const Tensor& query, const Tensor& k, const Tensor& value, const OptTensor& mask, double dropout_p,
                          bool is_causal, OptDouble scale, bool enable_gqa) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_attention(cast(query), cast(k), cast(value), cast(mask), dropout_p, is_causal, scale, enable_gqa);
  }

  static OutLse rows_first(const Tensor& query, const Tensor& k, const Tensor& value, OptSymInt window_left,
                           OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, bool heads_first_in,
                           OptBool deterministic) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_rows_first(cast(query), cast(k), cast(value), window_left, window_right, bottom_right, scale, softcap,
                           heads_first_in, deterministic);
  }

  static void add(torch::Library& m) {
    m.impl("attention_rows_first", TORCH_FN(rows_first));
    m.impl("attention", TORCH_FN(attention));
    m.impl("attention_forward", TORCH_FN(flat_forward<forward>));
    m.impl("attention_varlen_forward", TORCH_FN(flat_varlen_forward<forward>));
  }
};

}  // namespace
}  // namespace flash::op

TORCH_LIBRARY_IMPL(flash, AutocastCPU, m) { flash::op::Autocast<c10::kCPU>::add(m); }
TORCH_LIBRARY_IMPL(flash, AutocastCUDA, m) { flash::op::Autocast<c10::kCUDA>::add(m); }
