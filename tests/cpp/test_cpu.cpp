// The CPU kernels against a naive attention in fp64 that keeps whole rows of probabilities, over small odd shapes and every feature.
// The reference reads the same rounded inputs (backward: also the kernel's own out and lse), so what is left is the arithmetic.
// Memory around and between rows holds NaN: nothing outside the arrays may be read into a result.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "cpu/number.h"
#include "problem/coords.h"
#include "problem/mask.h"
#include "problem/philox.h"

namespace flash::cpu {
namespace {

using problem::Array;
using problem::DType;
using problem::Gradients;
using problem::Problem;

constexpr double kNone = -std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Executor pool(int threads) {
  return {threads, [threads](int64_t count, const std::function<void(int64_t)>& body) {
            std::atomic<int64_t> next{0};
            std::vector<std::thread> workers;
            for (int i = 0; i < threads; ++i)
              workers.emplace_back([&] {
                for (int64_t task; (task = next++) < count;) body(task);
              });
            for (auto& worker : workers) worker.join();
          }};
}

double read(DType type, const void* data, int64_t i) {
  if (type == DType::kBool) return static_cast<const bool*>(data)[i];
  double value = 0;
  with_type(type, [&](auto tag) { value = widen(static_cast<const decltype(tag)*>(data)[i]); });
  return value;
}
void write(DType type, void* data, int64_t i, double value) {
  if (type == DType::kBool) {
    static_cast<bool*>(data)[i] = value != 0;
    return;
  }
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    narrow(static_cast<decltype(widen(tag))>(value), static_cast<T*>(data) + i);
  });
}

// Numbers of one dtype, NaN (true for bool) until written.
struct Buffer {
  DType type = DType::kNone;
  std::vector<char> bytes;

  Buffer() = default;
  Buffer(DType t, int64_t count) : type(t), bytes(count * size_of(t)) {
    for (int64_t i = 0; i < count; ++i) write(t, bytes.data(), i, t == DType::kBool ? 1 : kNan);
  }
  void* data() { return bytes.data(); }
  // As doubles; to be called once the kernels have written.
  std::vector<double> values() const {
    std::vector<double> all(count());
    for (int64_t i = 0; i < count(); ++i) all[i] = (*this)[i];
    return all;
  }
  int64_t count() const { return type == DType::kNone ? 0 : static_cast<int64_t>(bytes.size()) / size_of(type); }
  double operator[](int64_t i) const { return read(type, bytes.data(), i); }
  void set(int64_t i, double value) { write(type, bytes.data(), i, value); }
};

enum class Layout { kHeadsFirst, kRowsFirst, kPadded };

struct Case {
  std::string name;
  int64_t batch = 1, heads = 1, kv_heads = 1, rows = 1, keys = 1, dim = 8, value_dim = 8;
  Layout layout = Layout::kHeadsFirst;
  int64_t left = problem::kOpen, right = problem::kOpen;
  bool bottom_right = false;
  DType mask = DType::kNone;
  std::string mask_shape = "bhlk";  // dimensions in which the mask is not broadcast
  bool mask_transposed = false;     // keys are the slow dimension
  bool alibi = false, sinks = false, lse_gradient = false;
  double softcap = 0, dropout = 0, scale = 0.3, spread = 1;
  std::vector<int32_t> lengths_q, lengths_k;  // packed
  bool dead_row = false;                      // the mask hides every key from row 0
  double logit = 0;                           // size of the scores where spread and scale do not tell
};

// One call with all its arrays.
struct Call {
  Case c;
  DType type, real;
  Problem p;
  Gradients g;
  Buffer query, key, value, out, lse, mask, slopes, sinks, dout, dlse, dquery, dkey, dvalue, delta, dmask;
  std::vector<int32_t> cu_q, cu_k;
  uint64_t seed[2] = {0x3FE123456789ABCDull, 0x3FD0F1E2D3C4B5A6ull};
  std::mt19937_64 random{12345};

  double normal() { return std::normal_distribution<double>()(random); }

  Array array(Buffer& buffer, DType t, int64_t heads, int64_t rows, int64_t dim, bool fill) {
    const bool packed = !cu_q.empty();
    const int64_t gap = c.layout == Layout::kPadded ? 5 : 0;
    Array a;
    if (packed || c.layout == Layout::kRowsFirst) {
      a.head = dim + gap;
      a.row = heads * a.head;
      a.batch = packed ? 0 : rows * a.row + gap;
    } else {
      a.row = dim + gap;
      a.head = rows * a.row + gap;
      a.batch = heads * a.head + gap;
    }
    const int64_t batch = packed ? 1 : c.batch;
    buffer = Buffer(t, std::max<int64_t>(1, batch * (packed ? rows * a.row : a.batch)));
    a.data = buffer.data();
    for (int64_t b = 0; fill && b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < dim; ++d) buffer.set(problem::offset(a, b, h, i) + d, c.spread * normal());
    return a;
  }

  Call(const Case& the_case, DType t) : c(the_case), type(t), real(t == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32) {
    int64_t rows = c.rows, keys = c.keys;
    if (!c.lengths_q.empty()) {
      c.batch = static_cast<int64_t>(c.lengths_q.size());
      cu_q = cu_k = {1};  // a row and a key before the first sequence belong to none
      c.rows = c.keys = 0;
      for (size_t i = 0; i < c.lengths_q.size(); ++i) {
        cu_q.push_back(cu_q.back() + c.lengths_q[i]);
        cu_k.push_back(cu_k.back() + c.lengths_k[i]);
        c.rows = std::max<int64_t>(c.rows, c.lengths_q[i]);
        c.keys = std::max<int64_t>(c.keys, c.lengths_k[i]);
      }
      rows = cu_q.back() + 2;
      keys = cu_k.back() + 3;
      p.cu_seqlens_q = cu_q.data();
      p.cu_seqlens_k = cu_k.data();
      p.total_rows = rows;
      p.total_keys = keys;
    }
    p.dtype = type;
    p.batch = c.batch, p.heads = c.heads, p.kv_heads = c.kv_heads, p.rows = c.rows, p.keys = c.keys;
    p.head_dim = c.dim, p.value_dim = c.value_dim;
    p.query = array(query, type, c.heads, rows, c.dim, true);
    p.key = array(key, type, c.kv_heads, keys, c.dim, true);
    p.value = array(value, type, c.kv_heads, keys, c.value_dim, true);
    p.out = array(out, type, c.heads, rows, c.value_dim, false);
    g.dout = array(dout, type, c.heads, rows, c.value_dim, true);
    g.dquery = array(dquery, type, c.heads, rows, c.dim, false);
    g.dkey = array(dkey, type, c.kv_heads, keys, c.dim, false);
    g.dvalue = array(dvalue, type, c.kv_heads, keys, c.value_dim, false);
    const bool packed = p.packed();
    p.lse_head = rows;
    p.lse_batch = packed ? 0 : c.heads * rows;
    const int64_t statistics = (packed ? 1 : c.batch) * c.heads * rows;
    lse = Buffer(real, statistics);
    delta = Buffer(real, statistics);
    p.lse = lse.data();
    g.delta = delta.data();
    if (c.lse_gradient) {
      dlse = Buffer(real, statistics);
      for (int64_t i = 0; i < statistics; ++i) dlse.set(i, normal());
      g.dlse = dlse.data();
    }
    p.scale = c.scale, p.softcap = c.softcap, p.left = c.left, p.right = c.right, p.bottom_right = c.bottom_right;
    if (c.alibi) {
      slopes = Buffer(real, c.batch * c.heads);
      for (int64_t i = 0; i < slopes.count(); ++i) slopes.set(i, 0.05 * static_cast<double>(i + 1));
      p.alibi_slopes = slopes.data();
      p.alibi_batch = c.heads;
    }
    if (c.sinks) {
      sinks = Buffer(real, c.heads);
      for (int64_t i = 0; i < c.heads; ++i) sinks.set(i, i % 3 == 2 ? kNone : normal());
      p.sinks = sinks.data();
    }
    p.dropout_p = c.dropout;
    p.seed = seed;
    if (c.mask != DType::kNone) make_mask();
  }

  int64_t mask_size(char dimension, int64_t full) const { return c.mask_shape.find(dimension) == std::string::npos ? 1 : full; }

  void make_mask() {
    const int64_t b = mask_size('b', c.batch), h = mask_size('h', c.heads), l = mask_size('l', c.rows),
                  k = mask_size('k', c.keys);
    p.mask.dtype = c.mask;
    const int64_t key_stride = c.mask_transposed ? l : 1, row_stride = c.mask_transposed ? 1 : k;
    p.mask.key = k > 1 ? key_stride : 0;
    p.mask.row = l > 1 ? row_stride : 0;
    p.mask.head = h > 1 ? l * k : 0;
    p.mask.batch = b > 1 ? h * l * k : 0;
    mask = Buffer(c.mask, b * h * l * k);
    for (int64_t i = 0; i < mask.count(); ++i) {
      const bool hidden = random() % 4 == 0;
      mask.set(i, c.mask == DType::kBool ? !hidden : hidden ? kNone : normal());
    }
    for (int64_t j = 0; c.dead_row && j < k; ++j) mask.set(j * key_stride, c.mask == DType::kBool ? 0 : kNone);
    p.mask.data = mask.data();
    dmask = Buffer(real, b * h * l * k);
    g.dmask = dmask.data();
    g.dmask_key = k > 1 ? 1 : 0;
    g.dmask_row = l > 1 ? k : 0;
    g.dmask_head = h > 1 ? l * k : 0;
    g.dmask_batch = b > 1 ? h * l * k : 0;
  }

  // ---- the reference -------------------------------------------------------------------------------------------------------
  static double dot(const std::vector<double>& a, int64_t at_a, const std::vector<double>& b, int64_t at_b, int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += a[at_a + d] * b[at_b + d];
    return sum;
  }

  struct Inputs {
    std::vector<double> query, key, value, out, dout;
  };
  Inputs inputs() const { return {query.values(), key.values(), value.values(), out.values(), dout.values()}; }

  struct Row {
    std::vector<double> score, cap, keep;  // natural units; derivative of softcap; what dropout multiplies by
    double lse = kNone;
  };
  Row row(const Inputs& in, const problem::Sequence& s, int64_t h, int64_t i) const {
    const auto interval = problem::interval(p, s.rows, s.keys);
    const int64_t kv = h / (c.heads / c.kv_heads);
    Row r;
    double top = c.sinks ? sinks[h] : kNone;
    for (int64_t j = 0; j < s.keys; ++j) {
      const int64_t diagonal = i + interval.diagonal;
      double x = kNone, cap = 1;
      if (j >= diagonal - c.left && j <= diagonal + c.right) {
        x = c.scale * dot(in.query, problem::offset(p.query, s.batch, h, s.row + i), in.key,
                          problem::offset(p.key, s.batch, kv, s.key + j), c.dim);
        if (c.softcap > 0) {
          const double t = std::tanh(x / c.softcap);
          x = c.softcap * t;
          cap = 1 - t * t;
        }
        if (c.alibi) x -= slopes[s.batch * c.heads + h] * std::abs(static_cast<double>(diagonal - j));
        if (c.mask != DType::kNone) {
          const double m = mask[s.batch * p.mask.batch + h * p.mask.head + i * p.mask.row + j * p.mask.key];
          x = c.mask == DType::kBool ? (m != 0 ? x : kNone) : m == kNone ? kNone : x + m;
        }
      }
      double keep = 1;
      if (c.dropout > 0)
        keep = problem::dropout(seed, c.dropout).keeps(s.batch * c.heads + h, i, j) && c.dropout < 1 ? 1 / (1 - c.dropout) : 0;
      r.score.push_back(x);
      r.cap.push_back(cap);
      r.keep.push_back(keep);
      top = std::max(top, x);
    }
    if (top == kNone) return r;
    double sum = c.sinks ? std::exp(sinks[h] - top) : 0;
    for (double x : r.score) sum += std::exp(x - top);
    r.lse = top + std::log(sum);
    return r;
  }

  // body(sequence, head, row) for every row of every sequence.
  void each_row(const std::function<void(const problem::Sequence&, int64_t, int64_t)>& body) const {
    for (int64_t b = 0; b < c.batch; ++b) {
      const auto s = problem::sequence(p, b);
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < s.rows; ++i) body(s, h, i);
    }
  }
};

double epsilon(DType type) {
  return type == DType::kFloat64 ? 0x1p-53 : type == DType::kFloat32 ? 0x1p-24 : type == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

// got = want up to one rounding to `type` and `units` roundings of the arithmetic, in units of `size`.
void expect_close(double got, double want, DType type, double size, double units, const std::string& what) {
  if (std::isnan(want) || std::isinf(want)) {
    EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << what << ": " << got << " instead of " << want;
    return;
  }
  const double inner = type == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  const double tiny = type == DType::kFloat16 ? 0x1p-25 : 0;
  // AMX takes probabilities and their gradients rounded to bf16.
  const bool rounded = type == DType::kBFloat16 && std::string(instruction_set()) == "amx";
  const double limit = std::abs(want) * epsilon(type) + units * inner * size + (rounded ? 0x1p-9 * size : 0) + tiny;
  EXPECT_LE(std::abs(got - want), limit) << what << ": " << got << " instead of " << want;
}

// What rounding errors of scores grow with.
double logit_size(const Case& c) {
  return 1 + c.logit + 3 * c.spread * c.spread * std::abs(c.scale) * std::sqrt(static_cast<double>(c.dim)) + c.softcap;
}

void check_forward(Call& call) {
  const Case& c = call.c;
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
                   "out" + where + " dim " + std::to_string(d));
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

void check_backward(Call& call) {
  const Case& c = call.c;
  backward(call.p, call.g, pool(3));
  const auto in = call.inputs();
  std::vector<double> dq(call.dquery.count()), dk(call.dkey.count()), dv(call.dvalue.count()),
      dm(std::max<int64_t>(1, call.dmask.count()));
  auto sq = dq, sk = dk, sv = dv, sm = dm;  // sums of sizes
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
        dk[gk + d] += c.scale * ds * r.cap[j] * in.query[q + d];
        sk[gk + d] += std::abs(c.scale * ds_size * in.query[q + d]);
      }
      if (c.mask != DType::kNone) {
        const int64_t m = s.batch * call.g.dmask_batch + h * call.g.dmask_head + i * call.g.dmask_row + j * call.g.dmask_key;
        dm[m] += ds;
        sm[m] += ds_size;
      }
    }
  });
  const double logit = logit_size(c);
  const auto compare = [&](const Buffer& got, const Array& a, int64_t heads, int64_t rows, int64_t dim,
                           const std::vector<double>& want, const std::vector<double>& size, const std::string& what) {
    const bool packed = call.p.packed();
    for (int64_t b = 0; b < (packed ? 1 : c.batch); ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < dim; ++d) {
            const int64_t at = problem::offset(a, b, h, i) + d;
            expect_close(got[at], want[at], call.type, size[at] * logit, 16,
                         what + " of batch " + std::to_string(b) + " head " + std::to_string(h) + " row " + std::to_string(i) +
                             " dim " + std::to_string(d));
            if (::testing::Test::HasFailure()) return;
          }
  };
  const int64_t rows = call.p.packed() ? call.p.total_rows : c.rows, keys = call.p.packed() ? call.p.total_keys : c.keys;
  compare(call.dquery, call.g.dquery, c.heads, rows, c.dim, dq, sq, "dquery");
  compare(call.dkey, call.g.dkey, c.kv_heads, keys, c.dim, dk, sk, "dkey");
  compare(call.dvalue, call.g.dvalue, c.kv_heads, keys, c.value_dim, dv, sv, "dvalue");
  for (int64_t i = 0; i < call.dmask.count(); ++i)
    expect_close(call.dmask[i], dm[i], call.real, sm[i] * logit, 16, "dmask " + std::to_string(i));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    c.batch = 2, c.heads = 2, c.kv_heads = 2, c.rows = 37, c.keys = 53, c.dim = 24, c.value_dim = 24;
    change(c);
    all.push_back(c);
  };
  add("Full", [](Case&) {});
  for (int64_t dim : {1, 3, 8, 17, 32, 65, 200, 264})
    add("Dim" + std::to_string(dim), [&](Case& c) {
      c.batch = 1, c.dim = dim, c.value_dim = dim == 17 ? 40 : dim == 40 ? 9 : dim;
    });
  for (int64_t rows : {1, 2, 4, 5, 7, 9, 24, 25, 49, 97, 130})
    add("Rows" + std::to_string(rows),
        [&](Case& c) { c.rows = rows, c.right = rows % 2 ? 0 : problem::kOpen, c.bottom_right = true; });
  for (int64_t keys : {1, 2, 3, 5, 31, 127, 128, 129, 257})
    add("Keys" + std::to_string(keys), [&](Case& c) { c.keys = keys, c.batch = 1; });
  add("Causal", [](Case& c) { c.right = 0, c.rows = 150, c.keys = 150; });
  add("CausalMoreRows", [](Case& c) { c.right = 0, c.rows = 90, c.keys = 40; });
  add("CausalMoreKeys", [](Case& c) { c.right = 0, c.rows = 30, c.keys = 190; });
  add("BottomRight", [](Case& c) { c.right = 0, c.bottom_right = true, c.rows = 61, c.keys = 200; });
  add("BottomRightEmptyRows", [](Case& c) { c.right = 0, c.bottom_right = true, c.rows = 80, c.keys = 20; });
  add("Window", [](Case& c) { c.left = 9, c.right = 4, c.rows = 140, c.keys = 140; });
  add("WindowPast", [](Case& c) { c.left = 20, c.right = -3, c.rows = 77, c.keys = 70, c.bottom_right = true; });
  add("WindowFuture", [](Case& c) { c.left = -2, c.right = 11, c.rows = 77, c.keys = 70; });
  add("Groups", [](Case& c) { c.heads = 6, c.kv_heads = 2, c.rows = 29, c.right = 0, c.bottom_right = true; });
  add("OneKvHead", [](Case& c) { c.heads = 8, c.kv_heads = 1, c.rows = 1, c.keys = 300; });
  add("Few", [](Case& c) { c.heads = 3, c.kv_heads = 1, c.rows = 1, c.keys = 261, c.dim = 72, c.value_dim = 100; });
  add("FewCausal", [](Case& c) { c.rows = 3, c.keys = 261, c.right = 0, c.bottom_right = true; });
  add("RowsFirst", [](Case& c) { c.layout = Layout::kRowsFirst, c.right = 0; });
  add("Padded", [](Case& c) { c.layout = Layout::kPadded; });
  add("NegativeScale", [](Case& c) { c.scale = -0.4, c.right = 0; });
  add("ZeroScale", [](Case& c) { c.scale = 0; });
  add("LargeLogits", [](Case& c) { c.spread = 5; });
  add("Softcap", [](Case& c) { c.softcap = 2.5, c.right = 0; });
  add("Alibi", [](Case& c) { c.alibi = true, c.bottom_right = true; });
  add("Sinks", [](Case& c) { c.sinks = true, c.heads = 3, c.kv_heads = 3, c.right = 0, c.rows = 70; });
  add("SinksEmptyRows",
      [](Case& c) { c.sinks = true, c.right = 0, c.bottom_right = true, c.rows = 80, c.keys = 20, c.lse_gradient = true; });
  add("LseGradient", [](Case& c) { c.lse_gradient = true; });
  add("Dropout", [](Case& c) { c.dropout = 0.3, c.rows = 70; });
  add("DropoutAll", [](Case& c) { c.dropout = 1; });
  add("DropoutGroups", [](Case& c) { c.dropout = 0.2, c.heads = 6, c.kv_heads = 2, c.right = 0; });
  add("DropoutFew", [](Case& c) { c.dropout = 0.2, c.rows = 2; });
  for (const char* shape : {"bhlk", "hlk", "lk", "bk", "k", "bhl", "bl", "h", ""})
    add("MaskBias_" + std::string(shape), [&](Case& c) { c.mask = DType::kFloat32, c.mask_shape = shape, c.keys = 300; });
  for (const char* shape : {"bhlk", "blk", "k"})
    add("MaskBool_" + std::string(shape),
        [&](Case& c) { c.mask = DType::kBool, c.mask_shape = shape, c.rows = 60, c.dead_row = true; });
  add("MaskTransposed", [](Case& c) { c.mask = DType::kFloat32, c.mask_transposed = true, c.mask_shape = "bhlk"; });
  add("MaskFew", [](Case& c) { c.mask = DType::kBool, c.mask_shape = "bk", c.rows = 1; });
  add("MaskGroupsCausal",
      [](Case& c) { c.mask = DType::kFloat32, c.mask_shape = "hlk", c.heads = 4, c.right = 0, c.dead_row = true; });
  add("Everything", [](Case& c) {
    c.mask = DType::kFloat32, c.mask_shape = "hlk", c.heads = 4, c.left = 60, c.right = 3, c.bottom_right = true, c.softcap = 5;
    c.alibi = true, c.sinks = true, c.dropout = 0.15, c.lse_gradient = true, c.rows = 75, c.keys = 140, c.dim = 20,
    c.value_dim = 28;
    c.layout = Layout::kPadded;
  });
  add("Packed", [](Case& c) { c.lengths_q = {5, 0, 40, 1, 130}, c.lengths_k = {9, 3, 40, 0, 77}, c.heads = 4, c.right = 0; });
  add("PackedBottomRight", [](Case& c) {
    c.lengths_q = {5, 40, 33}, c.lengths_k = {9, 20, 150}, c.right = 0, c.left = 30, c.bottom_right = true, c.alibi = true;
    c.dropout = 0.1, c.sinks = true, c.lse_gradient = true;
  });
  add("NoKeys", [](Case& c) { c.keys = 0; });
  add("NoRows", [](Case& c) { c.rows = 0; });
  return all;
}

struct Instance {
  Case c;
  DType type;
};

class Attention : public ::testing::TestWithParam<Instance> {};

TEST_P(Attention, MatchesReference) {
  const Instance& instance = GetParam();
  Call call(instance.c, instance.type);
  check_forward(call);
  if (!HasFailure()) check_backward(call);
}

std::string type_name(DType type) {
  return type == DType::kFloat64   ? "Float64"
         : type == DType::kFloat32 ? "Float32"
         : type == DType::kFloat16 ? "Float16"
                                   : "BFloat16";
}

std::vector<Instance> instances() {
  std::vector<Instance> all;
  for (const Case& c : cases())
    for (DType type : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      all.push_back({c, type});
      if (type == DType::kBFloat16 && c.dim == 24) {  // head dims that matrix units take
        all.push_back({c, type});
        all.back().c.name += "Panels";
        all.back().c.dim = 64, all.back().c.value_dim = 32, all.back().c.scale *= 0.6;
      }
      if (c.mask == DType::kFloat32 && type != DType::kFloat32 && c.mask_shape == "lk") {  // a mask of the query's own dtype
        all.push_back({c, type});
        all.back().c.name += "Own";
        all.back().c.mask = type;
      }
    }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Attention, ::testing::ValuesIn(instances()), [](const auto& info) {
  return info.param.c.name + (info.param.c.name.back() == '_' ? "Scalar" : "") + type_name(info.param.type);
});

// Cut into parts of keys (forward) and rounds (backward), and nothing may depend on the number of threads.
class Long : public ::testing::TestWithParam<DType> {};

TEST_P(Long, MatchesReferenceAndIgnoresThreads) {
  Case c;
  c.heads = 2, c.rows = 1200, c.keys = 1100, c.dim = 16, c.value_dim = 8, c.right = 0, c.scale = 0.25;
  if (GetParam() == DType::kBFloat16) c.dim = c.value_dim = 32;  // what matrix units take
  for (const bool decode : {false, true}) {
    if (decode) c.rows = 1, c.keys = 3000, c.bottom_right = true;
    Call call(c, GetParam()), other(c, GetParam());
    check_forward(call);
    check_backward(call);
    for (int threads : {1, 5}) {
      forward(other.p, pool(threads));
      backward(other.p, other.g, pool(threads));
      EXPECT_EQ(call.out.bytes, other.out.bytes);
      EXPECT_EQ(call.lse.bytes, other.lse.bytes);
      EXPECT_EQ(call.dquery.bytes, other.dquery.bytes);
      EXPECT_EQ(call.dkey.bytes, other.dkey.bytes);
      EXPECT_EQ(call.dvalue.bytes, other.dvalue.bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Long, ::testing::Values(DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return type_name(info.param); });

TEST(Values, NanStaysAndMaskedKeysDoNot) {
  Case c;
  c.rows = 40, c.keys = 40, c.right = 0;
  Call call(c, DType::kFloat32);
  call.query.set(problem::offset(call.p.query, 0, 0, 5), kNan);
  call.key.set(problem::offset(call.p.key, 0, 0, 30), kNan);
  forward(call.p, pool(1));
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(call.out[problem::offset(call.p.out, 0, 0, i)]), i == 5 || i >= 30) << i;
    EXPECT_EQ(std::isnan(call.lse[i]), i == 5 || i >= 30) << i;
  }
}

TEST(Values, HugeAndTinyLogits) {
  Case c;
  c.rows = 1, c.keys = 1, c.dim = c.value_dim = 64, c.scale = 0.125;
  Call call(c, DType::kBFloat16);
  for (int64_t d = 0; d < 64; ++d) call.query.set(d, 133120), call.key.set(d, 133120), call.value.set(d, 133120);
  forward(call.p, pool(1));
  for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(call.out[d], 133120);
  EXPECT_TRUE(std::isfinite(call.lse[0]));
  Case low;  // all scores far below zero: an ordinary softmax
  low.rows = 3, low.keys = 50, low.dim = 1, low.scale = 1, low.logit = 250000;
  Call deep(low, DType::kFloat32);
  for (int64_t i = 0; i < 3; ++i) deep.query.set(i, 500);
  for (int64_t j = 0; j < 50; ++j) deep.key.set(j, -500 - 0.001 * static_cast<double>(j));
  check_forward(deep);
}

TEST(Values, OnlyWhatIsAskedForIsWritten) {
  Case c;
  c.rows = 30, c.keys = 30;
  for (int wanted = 0; wanted < 3; ++wanted) {
    Call call(c, DType::kFloat32);
    forward(call.p, pool(1));
    Call whole(c, DType::kFloat32);
    forward(whole.p, pool(1));
    backward(whole.p, whole.g, pool(1));
    if (wanted != 0) call.g.dquery.data = nullptr;
    if (wanted != 1) call.g.dkey.data = nullptr;
    if (wanted != 2) call.g.dvalue.data = nullptr;
    call.g.delta = nullptr;
    backward(call.p, call.g, pool(1));
    Buffer untouched(DType::kFloat32, call.dquery.count());
    EXPECT_EQ(call.dquery.bytes, wanted == 0 ? whole.dquery.bytes : untouched.bytes);
    EXPECT_EQ(call.dkey.bytes, wanted == 1 ? whole.dkey.bytes : untouched.bytes);
    EXPECT_EQ(call.dvalue.bytes, wanted == 2 ? whole.dvalue.bytes : untouched.bytes);
  }
}

TEST(Merge, IsTheWhole) {
  Case c;
  c.rows = 20, c.keys = 64, c.value_dim = 9;
  Call whole(c, DType::kFloat32), first(c, DType::kFloat32), second(c, DType::kFloat32);
  first.p.keys = 24;
  second.p.keys = 40;
  second.p.key.data = static_cast<float*>(second.p.key.data) + 24 * second.p.key.row;
  second.p.value.data = static_cast<float*>(second.p.value.data) + 24 * second.p.value.row;
  for (Call* call : {&whole, &first, &second}) forward(call->p, pool(1));
  Buffer out(DType::kFloat32, 20 * 9), lse(DType::kFloat32, 20);
  merge(DType::kFloat32, 20, 9, first.out.data(), first.lse.data(), second.out.data(), second.lse.data(), out.data(),
        lse.data(), pool(2));
  for (int64_t i = 0; i < 20 * 9; ++i) EXPECT_NEAR(out[i], whole.out[i], 1e-6);
  for (int64_t i = 0; i < 20; ++i) EXPECT_NEAR(lse[i], whole.lse[i], 1e-6);
}

TEST(Merge, EmptyParts) {
  float a[2] = {1, 2}, b[2] = {NAN, NAN}, out[2], empty = -INFINITY, lse = 3, merged;
  merge(DType::kFloat32, 1, 2, a, &lse, b, &empty, out, &merged, pool(1));
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 2);
  EXPECT_EQ(merged, 3);
  merge(DType::kFloat32, 1, 2, b, &empty, b, &empty, out, &merged, pool(1));
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(merged, -INFINITY);
}

TEST(Numbers, HalfTypesRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    Float16 half_again;
    BFloat16 brain_again;
    narrow(widen(half), &half_again);
    narrow(widen(brain), &brain_again);
    if (!std::isnan(widen(half))) {
      EXPECT_EQ(half_again.bits, half.bits);
    }
    if (!std::isnan(widen(brain))) {
      EXPECT_EQ(brain_again.bits, brain.bits);
    }
  }
  Float16 half;
  narrow(65519.0f, &half);
  EXPECT_EQ(widen(half), 65504.0f);
  narrow(65520.0f, &half);
  EXPECT_EQ(widen(half), INFINITY);
  narrow(0x1p-25f, &half);  // a tie, to even
  EXPECT_EQ(widen(half), 0.0f);
  narrow(0x1.8p-25f, &half);
  EXPECT_EQ(widen(half), 0x1p-24f);
}

TEST(DropoutMask, IsPhilox) {
  const uint64_t seed[2] = {123, 456};
  std::vector<uint8_t> keep(2 * 3 * 19 * 35);
  dropout_mask(seed, 0.25, 2, 3, 19, 35, keep.data(), pool(2));
  int64_t kept = 0, at = 0;
  for (int64_t plane = 0; plane < 6; ++plane)
    for (int64_t i = 0; i < 19; ++i)
      for (int64_t j = 0; j < 35; ++j, ++at) {
        EXPECT_EQ(keep[at] != 0, problem::dropout(seed, 0.25).keeps(plane, i, j));
        kept += keep[at];
      }
  EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(keep.size()), 0.75, 0.03);
}

}  // namespace
}  // namespace flash::cpu
