// cpu/gradient.cpp: backward, cut into tasks. No atomics: every element of a gradient is added to by one task at a time, in an
// order that the problem fixes.
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <vector>

#include "cpu/schedule.h"
#include "problem/mask.h"

namespace flash::cpu {
namespace {

using problem::Gradients;
using problem::Problem;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How far each of several runs of tasks has come.
class Progress {
 public:
  explicit Progress(int64_t runs) : done_(runs) {}

  void wait(int64_t run, int64_t least) {
    for (int spins = 0; spins < 10'000; ++spins)  // some microseconds: going to sleep costs more
      if (done_[run].load(std::memory_order_acquire) >= least) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_[run].load(std::memory_order_acquire) >= least; });
  }
  void set(int64_t run, int64_t done) {
    {
      const std::lock_guard lock(mutex_);
      done_[run].store(done, std::memory_order_release);
    }
    changed_.notify_all();
  }

 private:
  std::vector<std::atomic<int64_t>> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// dK and dV of one kv head of one sequence are summed over blocks of rows, the last rows first; dQ over tiles of keys, the first keys
// first. Where there are heads enough for the threads each is one task. Else its rows and keys are cut into `parts` parts each, and
// part r of the rows meets part k of the keys after part r + 1 of the rows met k and r met k - 1: that leaves every sum its order, so
// that the results depend neither on the threads nor on the parts. From the last rows on, because the longest rows of a causal mask
// are the first that may begin, and no row waits for shorter ones.
class BackwardRun {
 public:
  BackwardRun(const Problem& p, const Gradients& g, const Executor& executor)
      : p_(p), g_(g), executor_(executor), kernels_(kernels_for(p)), real_(p.fp64() ? 8 : 4) {
    const int64_t widest = std::max(p.head_dim, p.value_dim);
    tiling_.keys = widest <= 128 ? 64 : 32;
    const int64_t lanes = p.rows * (p.heads / p.kv_heads);
    const int64_t room =
        (int64_t{512} << 10) / (kernels_.group * std::max<int64_t>(1, 3 * p.head_dim + 2 * p.value_dim) * real_);
    tiling_.lanes =
        std::min(std::clamp<int64_t>(room, 1, 4), std::max<int64_t>(1, ceil_div(lanes, kernels_.group))) * kernels_.group;
    rows_step_ = tiling_.lanes / std::gcd(tiling_.lanes, p.heads / p.kv_heads);
    const int64_t heads = p.batch * p.kv_heads, threads = std::max(1, executor.threads);
    if (heads % threads != 0 && heads < 8 * threads)
      parts_ = std::min({ceil_div(4 * threads, heads), p.rows / rows_step_, p.keys / kLeastKeys});
    if (parts_ < 3) parts_ = 1;  // three of the four cells of two parts wait for each other
    dkey_stride_ = ceil_div(p.head_dim, kernels_.width) * kernels_.width;
    dvalue_stride_ = ceil_div(p.value_dim, kernels_.width) * kernels_.width;
    const bool real_output = size_of(p.dtype) == real_;
    dkey_space_ = g.dkey.data == nullptr || (real_output && dkey_stride_ == p.head_dim) ? 0 : dkey_stride_;
    dvalue_space_ = g.dvalue.data == nullptr || (real_output && dvalue_stride_ == p.value_dim) ? 0 : dvalue_stride_;
    dquery_space_ = g.dquery.data == nullptr || real_output ? 0 : p.head_dim;
  }

  void run() {
    delta();
    if (g_.dquery.data || g_.dkey.data || g_.dvalue.data) {
      if (parts_ == 1) {
        whole_heads();
      } else {
        cells();
      }
    }
    if (g_.dmask) mask();
  }

 private:
  static constexpr int64_t kLeastKeys = 128;  // of a part: each loads its rows anew

  void delta() {
    delta_ = g_.delta;
    if (delta_ == nullptr) {
      const int64_t rows = p_.packed() ? p_.total_rows : p_.rows;
      own_delta_ = allocate(((p_.batch - 1) * p_.lse_batch + (p_.heads - 1) * p_.lse_head + rows) * real_);
      delta_ = own_delta_.get();
    }
    constexpr int64_t kRows = 256;
    const int64_t chunks = ceil_div(p_.rows, kRows);
    for_each(executor_, p_.batch * p_.heads * chunks, 0, [&](int64_t i, void*) {
      const auto s = problem::sequence(p_, i / chunks / p_.heads);
      const int64_t begin = i % chunks * kRows;
      kernels_.delta(p_, g_, s, i / chunks % p_.heads, {begin, std::max(begin, std::min(begin + kRows, s.rows))}, delta_);
    });
  }

  char* at(const problem::Array& a, int64_t batch, int64_t head, int64_t row) const {
    return static_cast<char*>(a.data) + problem::offset(a, batch, head, row) * size_of(p_.dtype);
  }

  // A task without ranges: where the sums of one kv head are. The workspace is laid out [key][stride] of dK, then of dV.
  BackwardTask head_task(const problem::Sequence& s, int64_t kv, char* dkey, char* dvalue) const {
    BackwardTask task{};
    task.problem = &p_;
    task.gradients = &g_;
    task.sequence = s;
    task.kv_head = kv;
    task.delta = delta_;
    task.dkey = dkey_space_ ? dkey : g_.dkey.data ? at(g_.dkey, s.batch, kv, s.key) : nullptr;
    task.dvalue = dvalue_space_ ? dvalue : g_.dvalue.data ? at(g_.dvalue, s.batch, kv, s.key) : nullptr;
    task.dkey_stride = dkey_space_ ? dkey_space_ : g_.dkey.row;
    task.dvalue_stride = dvalue_space_ ? dvalue_space_ : g_.dvalue.row;
    return task;
  }
  // Before and after the sums of dK and dV of the task's keys.
  void clear(const BackwardTask& task) const {
    for (int64_t j = task.keys.begin; j < task.keys.end; ++j) {
      if (task.dkey) std::memset(static_cast<char*>(task.dkey) + j * task.dkey_stride * real_, 0, dkey_stride_ * real_);
      if (task.dvalue) std::memset(static_cast<char*>(task.dvalue) + j * task.dvalue_stride * real_, 0, dvalue_stride_ * real_);
    }
  }
  void round(const BackwardTask& task) const {
    const auto& s = task.sequence;
    const auto narrow = [&](const void* sums, int64_t space, int64_t dim, const problem::Array& to) {
      if (space)
        kernels_.narrow(static_cast<const char*>(sums) + task.keys.begin * space * real_, space,
                        task.keys.end - task.keys.begin, dim, p_.dtype, at(to, s.batch, task.kv_head, s.key + task.keys.begin),
                        to.row);
    };
    narrow(task.dkey, dkey_space_, p_.head_dim, g_.dkey);
    narrow(task.dvalue, dvalue_space_, p_.value_dim, g_.dvalue);
  }
  void round_query(const BackwardTask& task) const {
    const int64_t group = p_.heads / p_.kv_heads;
    for (int64_t h = task.kv_head * group; dquery_space_ && h < (task.kv_head + 1) * group; ++h)
      for (int64_t row = task.rows.begin; row < task.rows.end; ++row)
        kernels_.narrow(static_cast<char*>(task.dquery) + (h * task.dquery_head + row * task.dquery_row) * real_, 0, 1,
                        p_.head_dim, p_.dtype, at(g_.dquery, task.sequence.batch, h, task.sequence.row + row), 0);
  }

  struct Head {
    problem::Sequence sequence;
    int64_t kv_head;
    BackwardTask task;  // of cells
  };
  std::vector<Head> heads() const {
    std::vector<Head> result;
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t kv = 0; kv < p_.kv_heads; ++kv) result.push_back({problem::sequence(p_, b), kv, {}});
    return result;
  }

  void whole_heads() {
    std::vector<Head> all = heads();
    longest_first(all, [](const Head& h) { return h.sequence.rows * h.sequence.keys; });
    const int64_t dkey_bytes = p_.keys * dkey_space_ * real_, dvalue_bytes = p_.keys * dvalue_space_ * real_;
    const size_t scratch_bytes = (kernels_.backward_scratch(p_, tiling_) + 63) / 64 * 64;
    for_each(executor_, static_cast<int64_t>(all.size()), scratch_bytes + dkey_bytes + dvalue_bytes,
             [&](int64_t i, void* scratch) {
               char* sums = static_cast<char*>(scratch) + scratch_bytes;
               BackwardTask task = head_task(all[i].sequence, all[i].kv_head, sums, sums + dkey_bytes);
               task.rows = {0, task.sequence.rows};
               task.keys = {0, task.sequence.keys};
               clear(task);
               kernels_.backward(task, tiling_, scratch);
               round(task);
             });
  }

  // Part `i`, which begins at a multiple of `step` for the blocks of a task to be those of the whole head.
  Range part(int64_t length, int64_t i, int64_t step) const {
    const auto bound = [&](int64_t k) { return std::min(length, (length * k / parts_ + step / 2) / step * step); };
    return {bound(i), i + 1 == parts_ ? length : bound(i + 1)};
  }

  void cells() {
    std::vector<Head> all = heads();
    const int64_t keys = p_.packed() ? p_.total_keys : p_.batch * p_.keys,
                  rows = p_.packed() ? p_.total_rows : p_.batch * p_.rows;
    const int64_t dkey_bytes = keys * p_.kv_heads * dkey_space_ * real_;
    const Memory sums = allocate(dkey_bytes + keys * p_.kv_heads * dvalue_space_ * real_);
    const Memory dquery = allocate(rows * p_.heads * dquery_space_ * real_);
    for (Head& head : all) {
      const auto& s = head.sequence;
      const int64_t key = p_.packed() ? head.kv_head * keys + s.key : (s.batch * p_.kv_heads + head.kv_head) * p_.keys;
      char* base = static_cast<char*>(sums.get());
      head.task = head_task(s, head.kv_head, base + key * dkey_space_ * real_, base + dkey_bytes + key * dvalue_space_ * real_);
      if (dquery_space_) {
        const int64_t row = p_.packed() ? s.row : s.batch * p_.heads * p_.rows;
        head.task.dquery = static_cast<char*>(dquery.get()) + row * dquery_space_ * real_;
        head.task.dquery_head = (p_.packed() ? rows : p_.rows) * dquery_space_;
        head.task.dquery_row = dquery_space_;
      } else if (g_.dquery.data) {
        head.task.dquery = at(g_.dquery, s.batch, 0, s.row);
        head.task.dquery_head = g_.dquery.head;
        head.task.dquery_row = g_.dquery.row;
      }
    }
    const int64_t count = static_cast<int64_t>(all.size());
    struct Cell {
      int64_t head, turn, keys;  // turn 0 has the last rows
    };
    std::vector<Cell> order;  // what a cell waits for stands before it
    for (int64_t sum = 0; sum < 2 * parts_ - 1; ++sum)
      for (int64_t head = 0; head < count; ++head)
        for (int64_t turn = std::max<int64_t>(0, sum - parts_ + 1); turn <= std::min(sum, parts_ - 1); ++turn)
          order.push_back({head, turn, sum - turn});
    Progress met(count * parts_);  // [head][turn]: parts of keys that these rows have met
    for_each(executor_, static_cast<int64_t>(order.size()), kernels_.backward_scratch(p_, tiling_),
             [&](int64_t i, void* scratch) {
               const auto [head, turn, keys_part] = order[i];
               const int64_t own = head * parts_ + turn;
               met.wait(own, keys_part);
               if (turn > 0) met.wait(own - 1, keys_part + 1);
               BackwardTask task = all[head].task;
               task.rows = part(task.sequence.rows, parts_ - 1 - turn, rows_step_);
               task.keys = part(task.sequence.keys, keys_part, tiling_.keys);
               if (turn == 0) clear(task);
               kernels_.backward(task, tiling_, scratch);
               if (turn == parts_ - 1) round(task);
               if (keys_part == parts_ - 1) round_query(task);
               met.set(own, keys_part + 1);
             });
  }

  void mask() {
    const int64_t row_step = g_.dmask_row ? kernels_.group : std::max<int64_t>(1, p_.rows);
    const int64_t key_step = g_.dmask_key ? kMaskTiles * tiling_.keys : std::max<int64_t>(1, p_.keys);
    const int64_t batches = g_.dmask_batch ? p_.batch : 1, heads = g_.dmask_head ? p_.heads : 1;
    const int64_t rows = ceil_div(p_.rows, row_step), keys = ceil_div(p_.keys, key_step);
    for_each(executor_, batches * heads * rows * keys, kernels_.backward_scratch(p_, tiling_), [&](int64_t i, void* scratch) {
      const int64_t key = i % keys * key_step, row = i / keys % rows * row_step, head = i / keys / rows % heads;
      const int64_t batch = i / keys / rows / heads;
      const MaskTask task{&p_,
                          &g_,
                          delta_,
                          {batch, g_.dmask_batch ? batch + 1 : p_.batch},
                          {head, g_.dmask_head ? head + 1 : p_.heads},
                          {row, std::min(row + row_step, p_.rows)},
                          {key, std::min(key + key_step, p_.keys)}};
      kernels_.mask(task, tiling_, scratch);
    });
  }

  const Problem& p_;
  const Gradients& g_;
  const Executor& executor_;
  const Kernels& kernels_;
  const int64_t real_;  // bytes
  Tiling tiling_;
  int64_t rows_step_;  // rows of a whole number of blocks
  int64_t parts_ = 1;
  int64_t dkey_stride_, dvalue_stride_;  // elements of a row of sums
  // The same where sums need a workspace, else 0: they are kept in the output.
  int64_t dkey_space_, dvalue_space_, dquery_space_;
  void* delta_ = nullptr;
  Memory own_delta_;
};

}  // namespace

void backward(const Problem& p, const Gradients& g, const Executor& executor) {
  if (p.batch == 0 || p.kv_heads == 0) return;
  if (p.packed()) {
    fill(g.dquery, p.dtype, p.heads, p.total_rows, p.head_dim);
    fill(g.dkey, p.dtype, p.kv_heads, p.total_keys, p.head_dim);
    fill(g.dvalue, p.dtype, p.kv_heads, p.total_keys, p.value_dim);
    fill_statistic(p, g.delta, 0);
  }
  BackwardRun(p, g, executor).run();
}

}  // namespace flash::cpu
