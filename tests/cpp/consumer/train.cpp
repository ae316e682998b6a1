// Trains with flash::attention from C++ and checks it: gradients against a central difference and against attention written
// with at:: operators, then a few steps of descent on a projection. Prints what it found; exit status 1 if anything is wrong.
#include <flash_attn_ext/attention.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

int failures = 0;

void expect_below(const char* what, double error, double limit) {
  const bool good = error <= limit;  // false for NaN
  std::printf("%-58s %.2e %s %g\n", what, error, good ? "<=" : "ABOVE", limit);
  failures += good ? 0 : 1;
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

at::Tensor random(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).requires_grad_(); }

// Attention with bottom-right causal mask, bias and sinks in whole matrices. query [B, H, L, E], key and value [B, Hk, S, *].
at::Tensor reference(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
                     const at::Tensor& sinks) {
  const int64_t group = query.size(1) / key.size(1), rows = query.size(2), keys = key.size(2);
  const at::Tensor k = key.repeat_interleave(group, 1), v = value.repeat_interleave(group, 1);
  at::Tensor score = at::matmul(query, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(query.size(-1))) + bias;
  const at::Tensor hidden = at::ones({rows, keys}, torch::kBool).triu(keys - rows + 1);
  score = score.masked_fill(hidden, -INFINITY);
  const at::Tensor sink = sinks.view({1, -1, 1, 1}).expand({query.size(0), -1, rows, 1});
  return at::matmul(at::softmax(at::cat({score, sink}, -1), -1).narrow(-1, 0, keys), v);
}

void check_gradients() {
  const at::Tensor query = random({2, 4, 5, 8}), key = random({2, 2, 9, 8}), value = random({2, 2, 9, 6});
  const at::Tensor bias = random({1, 4, 5, 9}), sinks = random({4}), weight = torch::randn({2, 4, 5, 6}, torch::kDouble);
  const std::vector<at::Tensor> inputs{query, key, value, bias, sinks};
  const auto loss = [&] {
    const auto [out, lse] =
        flash::attention_forward(query, key, value, {.window_right = 0, .bottom_right = true}, bias, std::nullopt, sinks);
    return (out * weight).sum();
  };
  const auto gradients = torch::autograd::grad({loss()}, inputs);
  const auto expected = torch::autograd::grad({(reference(query, key, value, bias, sinks) * weight).sum()}, inputs);
  const char* names[] = {"query", "key", "value", "attn_mask", "sinks"};
  const double step = 1e-5;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_below((std::string("gradient of ") + names[i] + " against at::").c_str(), largest(gradients[i] - expected[i]),
                 1e-12);
    // Central difference in a random direction.
    const torch::NoGradGuard no_grad;
    const at::Tensor direction = at::randn_like(inputs[i]);
    inputs[i].add_(direction, step);
    const double above = loss().item<double>();
    inputs[i].sub_(direction, 2 * step);
    const double below = loss().item<double>();
    inputs[i].add_(direction, step);
    const double slope = (gradients[i] * direction).sum().item<double>();
    expect_below((std::string("gradient of ") + names[i] + " against a central difference").c_str(),
                 std::abs((above - below) / (2 * step) - slope), 1e-8);
  }
}

void check_same_as_torch() {
  const at::Tensor query = torch::randn({2, 3, 33, 16}), key = torch::randn({2, 3, 65, 16}),
                   value = torch::randn({2, 3, 65, 16});
  const at::Tensor out = flash::attention(query, key, value, {}, 0.0, /*is_causal=*/true);
  expect_below("attention against at::scaled_dot_product_attention",
               largest(out - at::scaled_dot_product_attention(query, key, value, {}, 0.0, true)), 2e-6);
  const auto [whole, lse] = flash::attention_forward(query, key, value);
  const auto [out_a, lse_a] = flash::attention_forward(query, key.narrow(2, 0, 20), value.narrow(2, 0, 20));
  const auto [out_b, lse_b] = flash::attention_forward(query, key.narrow(2, 20, 45), value.narrow(2, 20, 45));
  const auto [merged, merged_lse] = flash::merge(out_a, lse_a, out_b, lse_b);
  expect_below("merge of two halves of the keys", largest(merged - whole) + largest(merged_lse - lse), 4e-6);
  expect_below(
      "dropout keeps the share it should",
      std::abs(
          flash::dropout_mask(at::rand({2}, torch::kDouble), {2, 2, 64, 64}, 0.25).to(torch::kDouble).mean().item<double>() -
          0.75),
      0.02);
  std::printf("%s\n", flash::explain(query, key, value).c_str());
}

void check_training() {
  torch::manual_seed(0);
  torch::nn::Linear projection(16, 48);
  torch::optim::SGD optimizer(projection->parameters(), 0.5);
  const at::Tensor x = torch::randn({4, 32, 16}), target = torch::randn({4, 32, 16});
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    const auto qkv = projection(x).view({4, 32, 3, 2, 8}).permute({2, 0, 3, 1, 4}).unbind(0);  // 3 x [4, 2, 32, 8], views
    const at::Tensor out = flash::attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    const at::Tensor loss = torch::mse_loss(out.transpose(1, 2).reshape({4, 32, 16}), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.4f -> %.4f\n", first, last);
  expect_below("loss after 30 steps, as a share of the first", last / first, 0.97);
}

void check_error() {
  std::string message;
  try {
    flash::attention(torch::randn({2, 8}), torch::randn({3, 8}), torch::randn({4, 8}));
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  expect_below("an error names the lengths", message.find("same sequence length") == std::string::npos, 0);
}

}  // namespace

int main() {
  torch::manual_seed(1);
  check_gradients();
  check_same_as_torch();
  check_training();
  check_error();
  std::printf("%s\n", failures == 0 ? "all good" : "FAILED");
  return failures == 0 ? 0 : 1;
}
