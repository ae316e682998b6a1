// op/second_order.cpp. With G = g v^T, Z = what dropout keeps / (1 - p), c = softcap, s = scale q k^T, s' = c tanh(s / c),
// P = exp(s' + bias - lse), D = rowsum(g o out) - dlse, first order is
//   dv = (Z P)^T g,  B = Z G - D,  E = P B,  t = 1 - (s' / c)^2,  T = E t,  dq = scale T k,  dk = scale T^T q,  dmask = E,
//   psink = exp(sink - lse),  dsink = - sum psink D.
// For incoming gradients xq, xk, xv, xb, xs of these (all products elementwise where not of matrices):
//   X = scale (xq k^T + q xk^T),  Y = X t + xb,  M = P (Y B + Z (g xv^T)),  N = (M - 2 X E s' / c^2) t,  r = rowsum(Y P),
//   w = - xs psink                                                               (without softcap t = 1 and N = M)
//   g:   (Z P) xv + (Z Y P) v - (r - w) out     out: -(r - w) g     dlse: r - w      lse: -rowsum M - w D
//   q:   scale (N k + T xk)                     k: scale (N^T q + T^T xq)            v: (Z Y P)^T g      mask: M     sink: w D
#include "op/second_order.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "op/check.h"

namespace flash::op {
namespace {

// a += b, where undefined is zero.
void add(Tensor& a, const Tensor& b) {
  if (b.defined()) a = a.defined() ? a + b : b;
}

Tensor transpose(const Tensor& t) { return t.transpose(-1, -2); }

// Sums over what was broadcast, as autograd does for expand.
Tensor sum_to(const Tensor& t, const OptTensor& like) {
  return t.sum_to_size_symint(like->sym_sizes()).to(like->scalar_type());
}

class Composite {
 public:
  Composite(const Gradients5& x, const Results& results, const Inputs& in, const Options& options)
      : in_(in), type_(accumulate_type(in.query)), softcap_(options.softcap) {
    heads_ = in.query.sym_size(1);
    group_ = heads_.sym_eq(0).guard_bool(__FILE__, __LINE__) ? c10::SymInt(1) : heads_ / in.key.sym_size(1);
    q_ = in.query.to(type_);
    k_ = expand(in.key);
    v_ = expand(in.value);
    g_ = results.grad_out.to(type_);
    out_ = results.out.to(type_);
    xq_ = cast(x[kQuery]);
    xk_ = x[kKey].defined() ? expand(x[kKey]) : Tensor();
    xv_ = x[kValue].defined() ? expand(x[kValue]) : Tensor();
    xb_ = cast(x[kMask]);
    xs_ = cast(x[kSinks]);
    const auto head_dim = in.query.sym_size(-1).guard_int(__FILE__, __LINE__);
    scale_ = options.scale.value_or(head_dim == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(head_dim)));
    weigh(results, options);
  }

  SecondOrder run() {
    SecondOrder d;
    Tensor x;
    if (xq_.defined()) add(x, at::matmul(xq_, transpose(k_)));
    if (xk_.defined()) add(x, at::matmul(q_, transpose(xk_)));
    if (x.defined()) x = x * scale_;
    Tensor y = x.defined() && t_.defined() ? x * t_ : x;
    add(y, xb_);
    const Tensor zp = drop(p_);

    Tensor m, r, w;
    if (y.defined()) {
      m = p_ * y * b_;
      r = (y * p_).sum(-1);
      const Tensor zyp = drop(y * p_);
      add(d.grad_out, at::matmul(zyp, v_));
      d.value = reduce(at::matmul(transpose(zyp), g_), in_.value);
    }
    if (xv_.defined()) {
      add(m, zp * at::matmul(g_, transpose(xv_)));
      add(d.grad_out, at::matmul(zp, xv_));
    }
    if (m.defined()) {
      Tensor n = m;
      if (t_.defined()) {
        if (x.defined()) n = n - x * e_ * capped_ * (2.0 / (softcap_ * softcap_));
        n = n * t_;
      }
      d.query = at::matmul(n, k_) * scale_;
      d.key = at::matmul(transpose(n), q_) * scale_;
      d.lse = -m.sum(-1);
      if (in_.attn_mask.has_value() && in_.attn_mask->is_floating_point()) d.attn_mask = sum_to(m, in_.attn_mask);
    }
    const Tensor t = t_.defined() ? e_ * t_ : e_;
    if (xk_.defined()) add(d.query, at::matmul(t, xk_) * scale_);
    if (xq_.defined()) add(d.key, at::matmul(transpose(t), xq_) * scale_);
    if (xs_.defined()) {
      w = -xs_.unsqueeze(-1) * sink_;
      d.sinks = sum_to((w * delta_).sum(at::IntArrayRef{0, 2}), in_.sinks);
      add(d.lse, -w * delta_);
      r = r.defined() ? r - w : -w;
    }
    if (r.defined()) {
      d.grad_lse = r;
      d.out = -r.unsqueeze(-1) * g_;
      add(d.grad_out, -r.unsqueeze(-1) * out_);
    }
    if (d.grad_out.defined()) d.grad_out = d.grad_out.to(in_.query.scalar_type());
    if (d.out.defined()) d.out = d.out.to(in_.query.scalar_type());
    if (d.query.defined()) d.query = d.query.to(in_.query.scalar_type());
    if (d.key.defined()) d.key = reduce(d.key, in_.key);
    return d;
  }

 private:
  Tensor cast(const Tensor& t) const { return t.defined() ? t.to(type_) : t; }

  // [B, Hk, ...] -> [B, H, ...]: each head of key and value for its group.
  Tensor expand(const Tensor& t) const {
    const Tensor wide = t.to(type_);
    if (is_one(group_)) return wide;
    const auto s = t.sym_sizes();
    return wide.unsqueeze(2).expand_symint({s[0], s[1], group_, s[2], s[3]}).reshape_symint({s[0], heads_, s[2], s[3]});
  }

  // [B, H, ...] -> [B, Hk, ...]: sums over the group.
  Tensor reduce(const Tensor& t, const Tensor& like) const {
    if (is_one(group_)) return t.to(like.scalar_type());
    const auto s = like.sym_sizes();
    return t.reshape_symint({s[0], s[1], group_, s[2], s[3]}).sum(2).to(like.scalar_type());
  }

  Tensor drop(const Tensor& t) const { return z_.defined() ? t * z_ : t; }

  // Where the window lets row i see key j; undefined if everywhere. [L, S]
  static Tensor visible(const Tensor& distance, const Options& options) {
    Tensor see;
    if (options.window_left.has_value()) see = distance.ge(at::Scalar(-*options.window_left));
    if (options.window_right.has_value()) {
      const Tensor right = distance.le(at::Scalar(*options.window_right));
      see = see.defined() ? see.logical_and(right) : right;
    }
    return see;
  }

  // P, psink, Z, D and what follows from them.
  void weigh(const Results& results, const Options& options) {
    const c10::SymInt rows = in_.query.sym_size(2), keys = in_.key.sym_size(2);
    const auto integer = in_.query.options().dtype(at::kLong);
    const c10::SymInt diagonal = options.bottom_right ? keys - rows : c10::SymInt(0);
    // distance[i, j] = j - (i + d)
    const Tensor distance = at::arange(keys, integer) - (at::arange(rows, integer) + diagonal).unsqueeze(-1);
    Tensor score = at::matmul(q_, transpose(k_)) * scale_;
    if (softcap_ > 0.0) {
      capped_ = at::tanh(score / softcap_) * softcap_;
      t_ = 1.0 - (capped_ / softcap_).square();
      score = capped_;
    }
    if (in_.alibi_slopes.has_value()) {
      score = score - in_.alibi_slopes->to(type_).unsqueeze(-1).unsqueeze(-1) * distance.abs().to(type_);
    }
    Tensor see = visible(distance, options);
    if (in_.attn_mask.has_value()) {
      if (in_.attn_mask->scalar_type() == at::kBool) {
        see = see.defined() ? see.logical_and(*in_.attn_mask) : *in_.attn_mask;
      } else {
        score = score + in_.attn_mask->to(type_);
      }
    }
    // Rows that see nothing have lse -inf: every weight is 0. Masked before exp, so that no NaN enters a derivative.
    const Tensor lse = results.lse.unsqueeze(-1), seen = lse.isneginf().logical_not();
    see = see.defined() ? see.logical_and(seen) : seen;
    p_ = at::exp(at::where(see, score - lse, -std::numeric_limits<double>::infinity()));
    if (options.dropout_p > 0.0) {
      const auto s = in_.query.sym_sizes();
      const Tensor keep = call_dropout_mask(*in_.seed, {s[0], s[1], rows, keys}, options.dropout_p);
      z_ = options.dropout_p < 1.0 ? keep.to(type_) / (1.0 - options.dropout_p) : at::zeros({}, p_.options());
    }
    delta_ = (g_ * out_).sum(-1);
    if (results.grad_lse.has_value()) delta_ = delta_ - *results.grad_lse;
    b_ = drop(at::matmul(g_, transpose(v_))) - delta_.unsqueeze(-1);
    e_ = p_ * b_;
    if (xs_.defined()) {
      const Tensor logit = in_.sinks->to(type_).unsqueeze(-1) - results.lse;
      sink_ = at::exp(at::where(results.lse.isneginf(), -std::numeric_limits<double>::infinity(), logit));
    }
  }

  const Inputs& in_;
  at::ScalarType type_;
  double softcap_, scale_;
  c10::SymInt heads_, group_;
  Tensor q_, k_, v_, g_, out_;     // k, v expanded to all heads
  Tensor xq_, xk_, xv_, xb_, xs_;  // incoming; undefined: zero
  Tensor p_, z_, delta_, b_, e_;   // P, Z, D, B, E
  Tensor capped_, t_, sink_;       // s', t: only with softcap; psink: only with xs
};

}  // namespace

SecondOrder second_order(const Gradients5& incoming, const Results& results, const Inputs& inputs, const Options& options) {
  return Composite(incoming, results, inputs, options).run();
}

}  // namespace flash::op
