// One attention call on the CPU with all its arrays, and what a naive attention in fp64 that keeps whole rows of probabilities has for it.
// Memory around and between rows holds NaN: nothing outside the arrays may be read into a result.
#pragma once
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

}  // namespace
}  // namespace flash::cpu
