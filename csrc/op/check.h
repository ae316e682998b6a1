// op/check.h: what a call must satisfy, and one readable error that lists everything it does not. The good path builds no text.
// Sizes are symbolic, so CPU, CUDA and Meta share the checks. (Tensors -> Problem, and what a device adds: op/backend.h.)
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>

#include "op/arguments.h"

namespace flash::op {

// Collects reasons; raise() throws one RuntimeError with all of them.
class Reasons {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    if (count_++ > 0) text_ += "\n  ";
    text_ += c10::str(parts...);
  }
  bool empty() const { return count_ == 0; }
  void raise(const char* op) const;  // returns if there is none

 private:
  int count_ = 0;
  std::string text_;
};

// True if the sizes are known to differ, as far as symbolic sizes can tell. Equal sizes of a traced graph become a guard.
bool differ(const c10::SymInt& a, const c10::SymInt& b);
bool is_one(const c10::SymInt& size);

// The rules of one argument group each; all add to `reasons`.
void check_same_type(const Tensor& query, const Tensor& key, const Tensor& value, Reasons& reasons);  // SDPA's texts
void check_mask_type(const Tensor& query, const Tensor& mask, Reasons& reasons);                      // SDPA's text
void check_dropout(double dropout_p, Reasons& reasons);
void check_strided(const Tensor& query, const Tensor& key, const Tensor& value, Reasons& reasons);  // not nested, sparse

void check_forward(const Inputs& inputs, const Options& options);
void check_backward(const Results& results, const Inputs& inputs, const Options& options);
void check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);
void check_seed(const Tensor& seed, Reasons& reasons);

// lse, sinks, slopes and delta: fp64 for fp64 inputs, else fp32.
inline at::ScalarType accumulate_type(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace flash::op
