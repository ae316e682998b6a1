// A call's results against the reference, which reads the same rounded inputs (backward: also the kernel's own out and lse), so what is
// left is the arithmetic.
#pragma once
#include <gtest/gtest.h>

#include "cpu_call.h"

namespace flash::cpu {
namespace {

double epsilon(DType type) {
  return type == DType::kFloat64 ? 0x1p-53 : type == DType::kFloat32 ? 0x1p-24 : type == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

// got = want up to one rounding to `type`, `units` roundings of the arithmetic, in units of `size`, and one rounding to bf16 of every
// factor whose products have the sizes that `rounded` adds up.
void expect_close(double got, double want, DType type, double size, double units, const std::string& what, double rounded = 0) {
  if (std::isnan(want) || std::isinf(want)) {
    EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << what << ": " << got << " instead of " << want;
    return;
  }
  const double inner = type == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  const double tiny = type == DType::kFloat16 ? 0x1p-25 : 0;
  const double limit = std::abs(want) * epsilon(type) + units * inner * size + epsilon(DType::kBFloat16) * rounded + tiny;
  EXPECT_LE(std::abs(got - want), limit) << what << ": " << got << " instead of " << want;
}

// What rounding errors of scores grow with.
double logit_size(const Case& c) {
  return 1 + c.logit + 3 * c.spread * c.spread * std::abs(c.scale) * std::sqrt(static_cast<double>(c.dim)) + c.softcap;
}

// Whether probabilities and their gradients are rounded to bf16 before they are multiplied: by instructions for that, in whole panels.
bool rounds(const Case& c, DType type) {
  const std::string set = instruction_set();
  return type == DType::kBFloat16 && (set == "amx" || set == "avx512_bf16") && c.dim % 32 == 0 && c.value_dim % 32 == 0;
}

inline void check_forward(Call& call) {
  const Case& c = call.c;
  const bool rounded = rounds(c, call.type);
  forward(call.p, pool(2));
  const double logit = logit_size(c);
  std::vector<bool> written(call.lse.count());
  const auto in = call.inputs();
  call.each_row([&](const problem::Sequence& s, int64_t h, int64_t i) {
    const auto r = call.row(in, s, h, i);
    const int64_t at = problem::lse_offset(call.p, s.batch, h, s.row + i), kv = h / (c.heads / c.kv_heads);
    written[at] = true;
    const std::string where =
        " of batch " + std::to_string(s.batch) + " head " + std::to_string(h) + " row " + std::to_string(i);
    expect_close(call.lse[at], r.lse, call.real, logit, 16, "lse" + where);
    for (int64_t d = 0; d < c.value_dim; ++d) {
      double want = 0, size = 0;
      for (int64_t j = 0; j < s.keys; ++j) {
        if (r.score[j] == kNone) continue;
        const double v = in.value[problem::offset(call.p.value, s.batch, kv, s.key + j) + d];
        const double part = std::exp(r.score[j] - r.lse) * r.keep[j] * v;
        want += part;
        size += std::abs(part);
      }
      expect_close(call.out[problem::offset(call.p.out, s.batch, h, s.row + i) + d], want, call.type, size * logit, 16,
                   "out" + where + " dim " + std::to_string(d), rounded ? size : 0);
      if (::testing::Test::HasFailure()) return;
    }
  });
  if (!call.p.packed()) return;
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < call.p.total_rows; ++i) {
      if (written[h * call.p.lse_head + i]) continue;
      EXPECT_EQ(call.lse[h * call.p.lse_head + i], kNone);
      for (int64_t d = 0; d < c.value_dim; ++d) EXPECT_EQ(call.out[problem::offset(call.p.out, 0, h, i) + d], 0);
    }
}

inline void check_backward(Call& call) {
  const Case& c = call.c;
  backward(call.p, call.g, pool(3));
  const auto in = call.inputs();
  std::vector<double> dq(call.dquery.count()), dk(call.dkey.count()), dv(call.dvalue.count()),
      dm(std::max<int64_t>(1, call.dmask.count()));
  auto sq = dq, sk = dk, sv = dv, sm = dm;  // sums of sizes
  auto tq = dq, tk = dk;                    // sums of products that have dS as a factor
  call.each_row([&](const problem::Sequence& s, int64_t h, int64_t i) {
    const auto r = call.row(in, s, h, i);
    const int64_t at = problem::lse_offset(call.p, s.batch, h, s.row + i), kv = h / (c.heads / c.kv_heads);
    const int64_t q = problem::offset(call.p.query, s.batch, h, s.row + i),
                  o = problem::offset(call.p.out, s.batch, h, s.row + i);
    const int64_t go = problem::offset(call.g.dout, s.batch, h, s.row + i),
                  gq = problem::offset(call.g.dquery, s.batch, h, s.row + i);
    double delta = 0, delta_size = 0;
    for (int64_t d = 0; d < c.value_dim; ++d) {
      delta += in.out[o + d] * in.dout[go + d];
      delta_size += std::abs(in.out[o + d] * in.dout[go + d]);
    }
    if (c.lse_gradient) delta -= call.dlse[at];
    expect_close(call.delta[at], delta, call.real, delta_size + 1, 16, "delta");
    const double lse = call.lse[at];
    for (int64_t j = 0; j < s.keys; ++j) {
      if (r.score[j] == kNone) continue;
      const int64_t k = problem::offset(call.p.key, s.batch, kv, s.key + j),
                    v = problem::offset(call.p.value, s.batch, kv, s.key + j);
      const int64_t gk = problem::offset(call.g.dkey, s.batch, kv, s.key + j),
                    gv = problem::offset(call.g.dvalue, s.batch, kv, s.key + j);
      const double probability = std::exp(r.score[j] - lse);
      double dp = 0, dp_size = 0;
      for (int64_t d = 0; d < c.value_dim; ++d) {
        dp += in.dout[go + d] * in.value[v + d];
        dp_size += std::abs(in.dout[go + d] * in.value[v + d]);
        dv[gv + d] += probability * r.keep[j] * in.dout[go + d];
        sv[gv + d] += std::abs(probability * r.keep[j] * in.dout[go + d]);
      }
      const double ds = probability * (dp * r.keep[j] - delta), ds_size = probability * (dp_size * r.keep[j] + delta_size + 1);
      for (int64_t d = 0; d < c.dim; ++d) {
        dq[gq + d] += c.scale * ds * r.cap[j] * in.key[k + d];
        sq[gq + d] += std::abs(c.scale * ds_size * in.key[k + d]);
        tq[gq + d] += std::abs(c.scale * ds * r.cap[j] * in.key[k + d]);
        dk[gk + d] += c.scale * ds * r.cap[j] * in.query[q + d];
        sk[gk + d] += std::abs(c.scale * ds_size * in.query[q + d]);
        tk[gk + d] += std::abs(c.scale * ds * r.cap[j] * in.query[q + d]);
      }
      if (c.mask != DType::kNone) {
        const int64_t m = s.batch * call.g.dmask_batch + h * call.g.dmask_head + i * call.g.dmask_row + j * call.g.dmask_key;
        dm[m] += ds;
        sm[m] += ds_size;
      }
    }
  });
  const double logit = logit_size(c);
  const bool rounded = rounds(c, call.type);
  const auto compare = [&](const Buffer& got, const Array& a, int64_t heads, int64_t rows, int64_t dim,
                           const std::vector<double>& want, const std::vector<double>& size,
                           const std::vector<double>& products, const std::string& what) {
    const bool packed = call.p.packed();
    for (int64_t b = 0; b < (packed ? 1 : c.batch); ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < dim; ++d) {
            const int64_t at = problem::offset(a, b, h, i) + d;
            expect_close(got[at], want[at], call.type, size[at] * logit, 16,
                         what + " of batch " + std::to_string(b) + " head " + std::to_string(h) + " row " + std::to_string(i) +
                             " dim " + std::to_string(d),
                         rounded ? products[at] : 0);
            if (::testing::Test::HasFailure()) return;
          }
  };
  const int64_t rows = call.p.packed() ? call.p.total_rows : c.rows, keys = call.p.packed() ? call.p.total_keys : c.keys;
  compare(call.dquery, call.g.dquery, c.heads, rows, c.dim, dq, sq, tq, "dquery");
  compare(call.dkey, call.g.dkey, c.kv_heads, keys, c.dim, dk, sk, tk, "dkey");
  compare(call.dvalue, call.g.dvalue, c.kv_heads, keys, c.value_dim, dv, sv, sv, "dvalue");
  for (int64_t i = 0; i < call.dmask.count(); ++i)
    expect_close(call.dmask[i], dm[i], call.real, sm[i] * logit, 16, "dmask " + std::to_string(i));
}

}  // namespace
}  // namespace flash::cpu
