// cpu/schedule.h: tasks onto threads. Which thread runs a task never changes what the task computes.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"

namespace flash::cpu {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

inline Memory allocate(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (p == nullptr && bytes > 0) throw std::bad_alloc();
  return Memory(p);
}

// body(i, scratch) for i in [0, count), taken in order by whichever thread is free.
template <class Body>
void for_each(const Executor& executor, int64_t count, size_t scratch_bytes, const Body& body) {
  if (count <= 0) return;
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t) {
    const Memory scratch = allocate(scratch_bytes);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i, scratch.get());
  };
  const int64_t threads = std::min<int64_t>(std::max(1, executor.threads), count);
  if (threads == 1) {
    work(0);
  } else {
    executor.run(threads, work);
  }
}

// Longest first, equal ones in their order.
template <class Task, class Cost>
void longest_first(std::vector<Task>& tasks, const Cost& cost) {
  const auto longer = [&](const Task& a, const Task& b) { return cost(a) > cost(b); };
  if (!std::is_sorted(tasks.begin(), tasks.end(), longer)) std::stable_sort(tasks.begin(), tasks.end(), longer);
}

inline const Kernels& kernels_for(const problem::Problem& p) {
  const InstructionSet& set = chosen();
  return p.fp64() ? set.fp64 : p.dtype == problem::DType::kBFloat16 ? set.bf16 : set.fp32;
}

// Rows of packed arrays that belong to no sequence.
void fill(const problem::Array& a, problem::DType type, int64_t heads, int64_t rows, int64_t dim);
void fill_statistic(const problem::Problem& p, void* values, double value);

constexpr int64_t kParallel = 64;  // tasks to aim for: independent of the threads at hand, so that results are too

}  // namespace flash::cpu
