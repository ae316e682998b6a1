// problem/softmax.h: the online softmax against the plain one, and its rules for empty and infinite values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "problem/softmax.h"

namespace flash::problem {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Scores in natural units, taken in one at a time.
template <class Real>
Softmax<Real> fold(const std::vector<double>& scores) {
  Softmax<Real> state;
  for (double score : scores) {
    const Real x = static_cast<Real>(score) * Softmax<Real>::kLog2e;
    state.fold_max(x);
    state.sum += Softmax<Real>::exp2(x - Softmax<Real>::reference(state.max));
  }
  return state;
}

template <class Real>
void check(Real tolerance) {
  const std::vector<double> scores{-3, 0.5, 2, -kInfinity, 1.75, -40, 2.25};
  double sum = 0;
  for (double x : scores) sum += std::exp(x);
  EXPECT_NEAR(fold<Real>(scores).lse(), std::log(sum), tolerance);
  EXPECT_NEAR(fold<Real>(scores).normaliser() * fold<Real>(scores).sum, 1, tolerance);
}

TEST(Softmax, IsThePlainOne) {
  check<double>(1e-14);
  check<float>(1e-6f);
}

TEST(Softmax, FactorIsExactlyOneWhereTheMaximumStays) {
  Softmax<float> state;
  EXPECT_EQ(state.fold_max(3.7f), 0);
  EXPECT_EQ(state.fold_max(3.7f), 1);
  EXPECT_EQ(state.fold_max(-100), 1);
  EXPECT_LT(state.fold_max(4), 1);
}

TEST(Softmax, ARowThatSawNothing) {
  const auto state = fold<float>({-kInfinity, -kInfinity});
  EXPECT_EQ(state.sum, 0);
  EXPECT_EQ(state.normaliser(), 0);
  EXPECT_EQ(state.lse(), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(Softmax<float>::exp2(1000 - Softmax<float>::lse2(state.lse())), 0);
}

TEST(Softmax, NanStays) {
  EXPECT_TRUE(std::isnan(fold<float>({1, std::nan(""), 2}).lse()));
  EXPECT_TRUE(std::isnan(fold<float>({std::nan("")}).lse()));
}

TEST(Softmax, Sink) {
  auto state = fold<double>({1, 2});
  const double before = state.sum, factor = state.fold_sink(3);
  EXPECT_NEAR(state.lse(), std::log(std::exp(1) + std::exp(2) + std::exp(3)), 1e-14);
  EXPECT_NEAR(factor, std::exp(-1), 1e-14);
  EXPECT_NEAR(state.sum, before * factor + 1, 1e-14);
  Softmax<double> empty;
  empty.fold_sink(-2.5);
  EXPECT_NEAR(empty.lse(), -2.5, 1e-15);
  auto same = fold<double>({1, 2});
  EXPECT_EQ(same.fold_sink(-kInfinity), 1);
  EXPECT_EQ(same.lse(), (fold<double>({1, 2}).lse()));
}

TEST(Merge, WeightsArePartsOfTheWhole) {
  const auto m = merge<double>(1.0, 2.0);
  EXPECT_NEAR(m.lse, std::log(std::exp(1) + std::exp(2)), 1e-15);
  EXPECT_NEAR(m.a, std::exp(1 - m.lse), 1e-15);
  EXPECT_NEAR(m.a + m.b, 1, 1e-15);
}

TEST(Merge, EmptyParts) {
  const auto both = merge<float>(-INFINITY, -INFINITY);
  EXPECT_EQ(both.lse, -INFINITY);
  EXPECT_EQ(both.a, 0);
  EXPECT_EQ(both.b, 0);
  const auto first = merge<float>(0.1f, -INFINITY), second = merge<float>(-INFINITY, 0.1f);
  EXPECT_EQ(first.a, 1);
  EXPECT_EQ(first.b, 0);
  EXPECT_EQ(first.lse, 0.1f);
  EXPECT_EQ(second.a, 0);
  EXPECT_EQ(second.b, 1);
  EXPECT_EQ(second.lse, 0.1f);
}

}  // namespace
}  // namespace flash::problem
