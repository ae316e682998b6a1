// cpu/mask_gradient.h: the gradient of the mask, in the shape of the mask. It recomputes P and dS: a full [batch, heads, rows, keys]
// array never exists unless the mask is one.
#pragma once
#include "cpu/backward.h"

namespace flash::cpu {
namespace {

// dmask: the gradient of the score itself, summed over the dimensions in which the mask is broadcast. Lanes are rows of one head.
template <class Real>
class MaskGradient : Differentiator<Real> {
  using Base = Differentiator<Real>;
  using Base::p_, Base::s_, Base::tiling_, Base::interval_, Base::scratch_, Base::least, Base::most;

 public:
  MaskGradient(const MaskTask& task, const problem::Sequence& sequence, const Tiling& tiling, void* memory)
      : Base(*task.problem, sequence, tiling, memory), task_(task) {}

  void clear() {
    const int64_t rows = task_.gradients->dmask_key ? task_.keys.end - task_.keys.begin : 1;
    std::memset(scratch_.mask, 0, sizeof(Real) * rows * kGroup<Real>);
  }

  void add(int64_t head) {
    for (int64_t row = task_.rows.begin; row < task_.rows.end; row += kGroup<Real>) {
      Group<Real>& g = scratch_.groups[0];
      fill_group(g, p_, s_, head, 1, row, least(row + kGroup<Real>, task_.rows.end));
      this->load_statistics(0, 1, static_cast<const Real*>(task_.delta));
      with_real_type<Real>(p_.dtype, [&](auto tag) {
        using T = decltype(tag);
        T* rows[kGroup<Real>];
        lane_rows(g, p_.query, s_, rows);
        pack<Real, T>(rows, 0, p_.head_dim, g.vectors, this->rules_.query_factor, this->queries(0));
        lane_rows(g, task_.gradients->dout, s_, rows);
        pack<Real, T>(rows, 0, p_.value_dim, g.vectors, 1, this->douts(0));
      });
      const problem::Span seen = interval_.rows(g.row_begin, g.row_end);
      const int64_t first = most(seen.first, task_.keys.begin), last = least(seen.last, task_.keys.end);
      for (int64_t key = first; key < last; key += tiling_.keys) block(head, key, least(key + tiling_.keys, last));
    }
  }

  void store() {
    const problem::Gradients& g = *task_.gradients;
    Real* to = static_cast<Real*>(g.dmask) + task_.batches.begin * g.dmask_batch + task_.heads.begin * g.dmask_head;
    const int64_t keys = g.dmask_key ? task_.keys.end - task_.keys.begin : 1;
    const int64_t rows = g.dmask_row ? task_.rows.end - task_.rows.begin : 1;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < keys; ++j) {
        const Real* from = scratch_.mask + j * kGroup<Real> + i;
        Real sum = from[0];
        if (g.dmask_row == 0)
          for (int lane = 1; lane < kGroup<Real>; ++lane) sum += from[lane];
        to[(task_.rows.begin + i) * g.dmask_row + (task_.keys.begin + j) * g.dmask_key] = sum;
      }
  }

 private:
  void block(int64_t head, int64_t begin, int64_t end) {
    const Group<Real>& g = scratch_.groups[0];
    const int64_t kv_head = problem::kv_head(p_, head), count = end - begin;
    const Rows<Real> keys = real_rows(p_.dtype, p_.key, s_.batch, kv_head, s_.key + begin, count, p_.head_dim, scratch_.keys);
    const Rows<Real> values =
        real_rows(p_.dtype, p_.value, s_.batch, kv_head, s_.key + begin, count, p_.value_dim, scratch_.values);
    with_vectors(g.vectors, [&](auto vectors) {
      this->template step<decltype(vectors)::value>(0, begin, end, keys, values, scratch_.tile, scratch_.gradient,
                                                    scratch_.stride, false);
    });
    const bool by_key = task_.gradients->dmask_key != 0;
    for (int64_t j = 0; j < count; ++j) {
      Real* to = scratch_.mask + (by_key ? begin + j - task_.keys.begin : 0) * kGroup<Real>;
      const Real* from = scratch_.gradient + j * scratch_.stride;
      for (int lane = 0; lane < g.lanes; ++lane) to[lane] += from[lane];
    }
  }

  const MaskTask& task_;
};

template <class Real>
void mask_task(const MaskTask& task, const Tiling& tiling, void* scratch) {
  problem::Sequence sequence = problem::sequence(*task.problem, task.batches.begin);
  MaskGradient<Real> gradient(task, sequence, tiling, scratch);
  gradient.clear();
  for (sequence.batch = task.batches.begin; sequence.batch < task.batches.end; ++sequence.batch)
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) gradient.add(head);
  gradient.store();
}

}  // namespace
}  // namespace flash::cpu
