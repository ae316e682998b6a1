// op/rows_first.h: attention_rows_first, which is attention_forward between swaps of dimensions 1 and 2, and its derivative.
#pragma once
#include "op/arguments.h"

namespace flash::op {

// A view with dimensions 1 and 2 swapped: heads before rows, or back. What has not four is left for the checks to report.
Tensor swapped(const Tensor& t);

// The kernel for every device; its arguments are those of the schema.
OutLse rows_first(const Tensor& query, const Tensor& key, const Tensor& value, OptSymInt window_left, OptSymInt window_right,
                  bool bottom_right, OptDouble scale, double softcap, bool heads_first_in, OptBool deterministic);

// The operator.
OutLse call_rows_first(const Tensor& query, const Tensor& key, const Tensor& value, OptSymInt window_left,
                       OptSymInt window_right, bool bottom_right, OptDouble scale, double softcap, bool heads_first_in,
                       OptBool deterministic);

// attention_backward of what attention_rows_first was given and returned.
Gradients5 rows_first_backward(const Results& results, const Inputs& inputs, const Options& options, Wanted wanted,
                               bool heads_first_in);

// The same as one operator.
Gradients5 call_rows_first_backward(const Results& results, const Inputs& inputs, const Options& options, bool heads_first_in);

}  // namespace flash::op
