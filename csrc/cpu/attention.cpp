// cpu/attention.cpp: cuts a call into tasks and runs them on the caller's threads.
#include "cpu/attention.h"

#include <atomic>
#include <memory>

#include "cpu/plain.h"

namespace flash::cpu {
namespace {

using problem::Sequence;

// body(sequence, index) for every index in [0, count(sequence)) of every sequence, on all threads.
template <class Body>
void each(const Executor& executor, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  executor.run(std::max(1, executor.threads), [&](int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  });
}

// Rows of packed arrays that belong to no sequence get a fixed value, so everything is written first.
template <class T>
void fill(const Array& a, int64_t heads, int64_t rows, int64_t dim) {
  if (a.data == nullptr) return;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i) std::fill_n(static_cast<T*>(a.data) + problem::offset(a, 0, h, i), dim, T{});
}

template <class T>
void forward_as(const Problem& p, const Executor& executor) {
  using Real = typename Accumulate<T>::type;
  Plain<T> plain{p};
  if (p.dropout_p > 0) plain.dropout = problem::dropout(p.seed, p.dropout_p);
  if (p.packed()) {
    fill<T>(p.out, p.heads, p.total_rows, p.value_dim);
    if (p.lse)
      for (int64_t h = 0; h < p.heads; ++h) std::fill_n(static_cast<Real*>(p.lse) + h * p.lse_head, p.total_rows, -Real(INFINITY));
  }
  each(executor, p.batch * p.heads, [&](int64_t task) {
    const auto s = problem::sequence(p, task / p.heads);
    std::vector<Real> sum(p.value_dim);
    for (int64_t i = 0; i < s.rows; ++i) plain.forward_row(s, task % p.heads, i, sum);
  });
}

template <class T>
void backward_as(const Problem& p, const Gradients& g, const Executor& executor) {
  using Real = typename Accumulate<T>::type;
  std::unique_ptr<Real[]> own;
  Plain<T> plain{p, &g, static_cast<Real*>(g.delta)};
  if (plain.delta == nullptr) {
    const int64_t rows = p.packed() ? p.total_rows : p.rows;
    own.reset(new Real[p.batch * p.lse_batch + p.heads * p.lse_head + rows]);
    plain.delta = own.get();
  }
  if (p.dropout_p > 0) plain.dropout = problem::dropout(p.seed, p.dropout_p);
  if (p.packed()) {
    fill<T>(g.dquery, p.heads, p.total_rows, p.head_dim);
    fill<T>(g.dkey, p.kv_heads, p.total_keys, p.head_dim);
    fill<T>(g.dvalue, p.kv_heads, p.total_keys, p.value_dim);
    if (g.delta)
      for (int64_t h = 0; h < p.heads; ++h) std::fill_n(static_cast<Real*>(g.delta) + h * p.lse_head, p.total_rows, Real(0));
  }
  each(executor, p.batch * p.heads, [&](int64_t task) {
    const auto s = problem::sequence(p, task / p.heads);
    std::vector<Real> sum(p.head_dim);
    for (int64_t i = 0; i < s.rows; ++i) {
      plain.delta_row(s, task % p.heads, i);
      if (g.dquery.data) plain.query_row(s, task % p.heads, i, sum);
    }
  });
  if (g.dkey.data || g.dvalue.data)
    each(executor, p.batch * p.kv_heads, [&](int64_t task) {
      const auto s = problem::sequence(p, task / p.kv_heads);
      std::vector<Real> dk(p.head_dim), dv(p.value_dim);
      for (int64_t j = 0; j < s.keys; ++j) plain.key_row(s, task % p.kv_heads, j, dk, dv);
    });
  if (g.dmask) {
    const int64_t heads = g.dmask_head ? p.heads : 1, rows = g.dmask_row ? p.rows : 1, keys = g.dmask_key ? p.keys : 1;
    each(executor, (g.dmask_batch ? p.batch : 1) * heads * rows, [&](int64_t task) {
      const int64_t b = task / rows / heads, h = task / rows % heads, i = task % rows;
      Real* to = static_cast<Real*>(g.dmask) + b * g.dmask_batch + h * g.dmask_head + i * g.dmask_row;
      for (int64_t j = 0; j < keys; ++j) to[j * g.dmask_key] = plain.mask_element(b, h, i, j);
    });
  }
}

template <class T>
void merge_as(int64_t count, int64_t dim, const void* out_a, const void* lse_a, const void* out_b, const void* lse_b, void* out,
              void* lse, const Executor& executor) {
  using Real = typename Accumulate<T>::type;
  const int64_t rows = 64;
  each(executor, (count + rows - 1) / rows, [&](int64_t task) {
    for (int64_t i = task * rows; i < std::min(count, (task + 1) * rows); ++i) {
      const auto m = problem::merge(static_cast<const Real*>(lse_a)[i], static_cast<const Real*>(lse_b)[i]);
      const T* a = static_cast<const T*>(out_a) + i * dim;
      const T* b = static_cast<const T*>(out_b) + i * dim;
      T* to = static_cast<T*>(out) + i * dim;
      for (int64_t d = 0; d < dim; ++d) {  // a weight of 0 takes nothing, not even NaN: that part saw no keys
        const Real x = m.a == 0 ? Real(0) : m.a * widen(a[d]);
        const Real y = m.b == 0 ? Real(0) : m.b * widen(b[d]);
        narrow(x + y, &to[d]);
      }
      static_cast<Real*>(lse)[i] = m.lse;
    }
  });
}

}  // namespace

const char* instruction_set() { return "portable"; }

void forward(const Problem& problem, const Executor& executor) {
  with_type(problem.dtype, [&](auto tag) { forward_as<decltype(tag)>(problem, executor); });
}

void backward(const Problem& problem, const Gradients& gradients, const Executor& executor) {
  with_type(problem.dtype, [&](auto tag) { backward_as<decltype(tag)>(problem, gradients, executor); });
}

void merge(DType dtype, int64_t count, int64_t value_dim, const void* out_a, const void* lse_a, const void* out_b, const void* lse_b,
           void* out, void* lse, const Executor& executor) {
  with_type(dtype, [&](auto tag) { merge_as<decltype(tag)>(count, value_dim, out_a, lse_a, out_b, lse_b, out, lse, executor); });
}

void dropout_mask(const uint64_t* seed, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys, uint8_t* keep,
                  const Executor& executor) {
  const auto dropout = problem::dropout(seed, p);
  each(executor, batch * heads * rows, [&](int64_t task) {
    const int64_t plane = task / rows, row = task % rows;
    for (int64_t j = 0; j < keys; ++j) keep[task * keys + j] = dropout.keeps(plane, row, j);
  });
}

}  // namespace flash::cpu
