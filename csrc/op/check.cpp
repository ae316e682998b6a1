// op/check.cpp: the rules. Texts that SDPA also raises are worded as there, because callers match on them.
#include "op/check.h"

#include <cmath>

namespace flash::op {
namespace {

bool is_float(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

void check_float(const char* name, const Tensor& tensor, Reasons& reasons) {
  if (!is_float(tensor.scalar_type())) {
    reasons.add(name, " is ", tensor.scalar_type(), ": it must be float16, bfloat16, float32 or float64.");
  }
}

void check_device(const char* name, const Tensor& tensor, const Tensor& query, Reasons& reasons) {
  if (tensor.device() != query.device()) {
    reasons.add(name, " is on ", tensor.device(), ", query on ", query.device(), ": they must be on one device.");
  }
}

bool check_rank(const char* name, const Tensor& tensor, int64_t rank, const char* shape, Reasons& reasons) {
  if (tensor.dim() == rank) return true;
  reasons.add(name, " has ", tensor.dim(), " dimensions, ", tensor.sym_sizes(), ": it must be ", shape, ".");
  return false;
}

// `sizes` is what the tensor must have.
void check_sizes(const char* name, const Tensor& tensor, c10::SymIntArrayRef sizes, const char* shape, Reasons& reasons) {
  const auto have = tensor.sym_sizes();
  bool wrong = have.size() != sizes.size();
  for (size_t i = 0; !wrong && i < sizes.size(); ++i) wrong = differ(have[i], sizes[i]);
  if (wrong) reasons.add(name, " has the sizes ", have, ": they must be ", sizes, ", ", shape, ".");
}

void check_operands(const Inputs& in, Reasons& reasons) {
  check_same_type(in.query, in.key, in.value, reasons);
  check_float("query", in.query, reasons);
  const int64_t rank = in.packed != nullptr ? 3 : 4;
  const bool ranks = check_rank("query", in.query, rank, rank == 3 ? "[total_q, H, E]" : "[B, H, L, E]", reasons) &
                     check_rank("key", in.key, rank, rank == 3 ? "[total_k, Hk, E]" : "[B, Hk, S, E]", reasons) &
                     check_rank("value", in.value, rank, rank == 3 ? "[total_k, Hk, Ev]" : "[B, Hk, S, Ev]", reasons);
  if (!ranks) return;
  const auto q = in.query.sym_sizes(), k = in.key.sym_sizes(), v = in.value.sym_sizes();
  if (differ(q[rank - 1], k[rank - 1])) {
    reasons.add("key has head_dim ", k[rank - 1], ", query has ", q[rank - 1], ": they must be equal.");
  }
  if (rank == 4 && (differ(q[0], k[0]) || differ(q[0], v[0]))) {
    reasons.add("query, key and value have batch sizes ", q[0], ", ", k[0], " and ", v[0], ": they must be equal.");
  }
  const size_t keys = rank == 4 ? 2 : 0;
  if (differ(k[keys], v[keys])) {
    reasons.add("Key and Value must have the same sequence length, but got ", k[keys], " and ", v[keys], ".");
  }
  if (differ(k[1], v[1])) {
    reasons.add("key has ", k[1], " heads, value has ", v[1], ": they must be equal.");
  } else if (differ(q[1], k[1]) && (!differ(k[1], 0) || differ(q[1] % k[1], 0))) {
    reasons.add("Number of heads in key and value must divide the number of heads in query, but got ", k[1], " and ", q[1],
                ".");
  }
}

void check_mask(const Inputs& in, Reasons& reasons) {
  const Tensor& mask = *in.attn_mask;
  check_mask_type(in.query, mask, reasons);
  check_device("attn_mask", mask, in.query, reasons);
  if (!check_rank("attn_mask", mask, 4, "[1 or B, 1 or H, 1 or L, 1 or S]", reasons)) return;
  if (in.query.dim() != 4 || in.key.dim() != 4) return;
  const auto q = in.query.sym_sizes(), m = mask.sym_sizes();
  const std::array<c10::SymInt, 4> full{q[0], q[1], q[2], in.key.sym_size(2)};
  for (size_t i = 0; i < 4; ++i) {
    if (is_one(m[i]) || !differ(m[i], full[i])) continue;
    reasons.add("attn_mask has the sizes ", m, ", which do not broadcast to [B, H, L, S] = ", c10::SymIntArrayRef(full), ".");
    return;
  }
}

void check_alibi(const Inputs& in, Reasons& reasons) {
  const Tensor& slopes = *in.alibi_slopes;
  check_float("alibi_slopes", slopes, reasons);
  check_device("alibi_slopes", slopes, in.query, reasons);
  if (in.query.dim() < 3) return;
  const auto have = slopes.sym_sizes();
  const c10::SymInt heads = in.query.sym_size(1);
  const c10::SymInt batch = in.packed != nullptr ? in.packed->cu_seqlens_q.sym_numel() - 1 : in.query.sym_size(0);
  const bool fits = (have.size() == 1 && !differ(have[0], heads)) ||
                    (have.size() == 2 && !differ(have[1], heads) && (!differ(have[0], batch) || is_one(have[0])));
  if (!fits) {
    reasons.add("alibi_slopes has the sizes ", have, ": they must be [H] = [", heads, "] or [B, H] = [", batch, ", ", heads,
                "].");
  }
}

void check_packed(const Inputs& in, Reasons& reasons) {
  const auto check_cu = [&](const char* name, const Tensor& cu) {
    if (cu.scalar_type() != at::kInt) reasons.add(name, " is ", cu.scalar_type(), ": it must be int32.");
    check_device(name, cu, in.query, reasons);
    if (cu.dim() != 1 || !differ(cu.sym_size(0), 0)) {
      reasons.add(name, " has the sizes ", cu.sym_sizes(), ": it must be [B + 1].");
      return false;
    }
    return true;
  };
  const Packed& p = *in.packed;
  if (check_cu("cu_seqlens_q", p.cu_seqlens_q) & check_cu("cu_seqlens_k", p.cu_seqlens_k) &&
      differ(p.cu_seqlens_q.sym_size(0), p.cu_seqlens_k.sym_size(0))) {
    reasons.add("cu_seqlens_q and cu_seqlens_k have ", p.cu_seqlens_q.sym_size(0), " and ", p.cu_seqlens_k.sym_size(0),
                " elements: they must be equal.");
  }
  for (const c10::SymInt& size : {p.max_seqlen_q, p.max_seqlen_k}) {
    if (TORCH_GUARD_OR_FALSE(size.sym_lt(0))) reasons.add("max_seqlen is ", size, ": it must be at least 0.");
  }
}

void check_inputs(const Inputs& in, const Options& options, Reasons& reasons) {
  check_strided(in.query, in.key, in.value, reasons);
  check_operands(in, reasons);
  if (in.attn_mask.has_value()) check_mask(in, reasons);
  if (in.alibi_slopes.has_value()) check_alibi(in, reasons);
  if (in.sinks.has_value()) {
    check_float("sinks", *in.sinks, reasons);
    check_device("sinks", *in.sinks, in.query, reasons);
    if (in.query.dim() >= 3) check_sizes("sinks", *in.sinks, {in.query.sym_size(1)}, "[H]", reasons);
  }
  if (in.packed != nullptr) check_packed(in, reasons);
  check_dropout(options.dropout_p, reasons);
  if (options.dropout_p > 0.0) {
    if (!in.seed.has_value()) {
      reasons.add("dropout_p is ", options.dropout_p,
                  " but seed is None: pass seed, a tensor of 2 float64 in [0, 1) such as "
                  "torch.rand(2, dtype=torch.float64), so that forward and backward drop the same elements.");
    } else {
      check_seed(*in.seed, reasons);
      check_device("seed", *in.seed, in.query, reasons);
    }
  }
  if (!(options.softcap >= 0.0 && std::isfinite(options.softcap))) {
    reasons.add("softcap is ", options.softcap, ": it must be finite and at least 0 (0 turns it off).");
  }
}

const char* name_of(const Inputs& in, const char* dense, const char* packed) { return in.packed != nullptr ? packed : dense; }

}  // namespace

void Reasons::raise(const char* op) const {
  if (count_ == 0) return;
  TORCH_CHECK(count_ > 1, op, ": ", text_);
  TORCH_CHECK(false, op, ": ", count_, " problems\n  ", text_);
}

bool differ(const c10::SymInt& a, const c10::SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x.has_value() && y.has_value() ? *x != *y : TORCH_GUARD_OR_FALSE(a.sym_ne(b));
}

bool is_one(const c10::SymInt& size) {
  const auto x = size.maybe_as_int();
  return x.has_value() ? *x == 1 : TORCH_GUARD_OR_FALSE(size.sym_eq(1));
}

void check_same_type(const Tensor& query, const Tensor& key, const Tensor& value, Reasons& reasons) {
  if (query.dtype() != key.dtype() || query.dtype() != value.dtype()) {
    reasons.add("Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
                " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  }
  if (query.device() != key.device() || query.device() != value.device()) {
    reasons.add("Expected query, key, and value to have the same device type, but got query.device: ", query.device(),
                " key.device: ", key.device(), " and value.device: ", value.device(), " instead.");
  }
}

void check_mask_type(const Tensor& query, const Tensor& mask, Reasons& reasons) {
  const auto type = mask.scalar_type();
  if (type != at::kBool && type != at::kFloat && type != query.scalar_type()) {
    reasons.add("Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: ", mask.dtype(),
                " and  query.dtype: ", query.dtype(), " instead.");
  }
}

void check_dropout(double dropout_p, Reasons& reasons) {
  if (!(dropout_p >= 0.0 && dropout_p <= 1.0)) {
    reasons.add("dropout probability has to be between 0 and 1, but got ", dropout_p);
  }
}

void check_strided(const Tensor& query, const Tensor& key, const Tensor& value, Reasons& reasons) {
  TORCH_CHECK_NOT_IMPLEMENTED(!query.is_nested() && !key.is_nested() && !value.is_nested(),
                              "flash::attention does not take nested tensors: pass their values() and offsets() to "
                              "attention_varlen, or pad them.");
  const auto check = [&](const char* name, const Tensor& t) {
    if (t.layout() != at::kStrided) reasons.add(name, " has the layout ", t.layout(), ": it must be strided.");
  };
  check("query", query);
  check("key", key);
  check("value", value);
}

void check_seed(const Tensor& seed, Reasons& reasons) {
  if (seed.scalar_type() != at::kDouble || seed.dim() != 1 || differ(seed.sym_size(0), 2)) {
    reasons.add("seed is ", seed.scalar_type(), " of sizes ", seed.sym_sizes(), ": it must be 2 float64.");
  }
}

void check_forward(const Inputs& in, const Options& options) {
  Reasons reasons;
  check_inputs(in, options, reasons);
  if (!reasons.empty()) reasons.raise(name_of(in, "flash::attention_forward", "flash::attention_varlen_forward"));
}

void check_backward(const Results& results, const Inputs& in, const Options& options) {
  Reasons reasons;
  check_inputs(in, options, reasons);
  if (reasons.empty()) {
    const auto q = in.query.sym_sizes();
    const auto last = in.value.sym_size(-1);
    std::array<c10::SymInt, 4> out, lse;
    const size_t rank = q.size();
    for (size_t i = 0; i < rank; ++i) out[i] = i + 1 < rank ? q[i] : last;
    for (size_t i = 0; i + 1 < rank; ++i) lse[i] = rank == 4 ? q[i] : q[1 - i];
    const c10::SymIntArrayRef out_sizes(out.data(), rank), lse_sizes(lse.data(), rank - 1);
    const auto check = [&](const char* name, const Tensor& t, c10::SymIntArrayRef sizes, at::ScalarType type,
                           const char* shape) {
      check_sizes(name, t, sizes, shape, reasons);
      check_device(name, t, in.query, reasons);
      if (t.scalar_type() != type) reasons.add(name, " is ", t.scalar_type(), ": it must be ", type, ".");
    };
    const char* out_shape = rank == 4 ? "[B, H, L, Ev]" : "[total_q, H, Ev]";
    const char* lse_shape = rank == 4 ? "[B, H, L]" : "[H, total_q]";
    check("grad_out", results.grad_out, out_sizes, in.query.scalar_type(), out_shape);
    check("out", results.out, out_sizes, in.query.scalar_type(), out_shape);
    check("lse", results.lse, lse_sizes, accumulate_type(in.query), lse_shape);
    if (results.grad_lse.has_value()) check("grad_lse", *results.grad_lse, lse_sizes, accumulate_type(in.query), lse_shape);
  }
  if (!reasons.empty()) reasons.raise(name_of(in, "flash::attention_backward", "flash::attention_varlen_backward"));
}

void check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  Reasons reasons;
  check_float("out_a", out_a, reasons);
  if (out_b.scalar_type() != out_a.scalar_type()) {
    reasons.add("out_b is ", out_b.scalar_type(), ", out_a is ", out_a.scalar_type(), ": they must be equal.");
  }
  for (const auto& [name, lse] : {std::pair<const char*, const Tensor&>("lse_a", lse_a), {"lse_b", lse_b}}) {
    if (lse.scalar_type() != accumulate_type(out_a)) {
      reasons.add(name, " is ", lse.scalar_type(), ": it must be ", accumulate_type(out_a), ".");
    }
    check_device(name, lse, out_a, reasons);
  }
  check_device("out_b", out_b, out_a, reasons);
  if (out_a.dim() < 1) {
    reasons.add("out_a has no dimension: it must be [..., Ev].");
  } else {
    check_sizes("out_b", out_b, out_a.sym_sizes(), "those of out_a", reasons);
    const auto rows = out_a.sym_sizes().slice(0, static_cast<size_t>(out_a.dim() - 1));
    check_sizes("lse_a", lse_a, rows, "those of out_a without the last", reasons);
    check_sizes("lse_b", lse_b, rows, "those of out_a without the last", reasons);
  }
  reasons.raise("flash::merge");
}

}  // namespace flash::op
