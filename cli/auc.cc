#include "cli/auc.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace ikbo::cli {

std::optional<double> auc(std::span<const double> scores, std::span<const double> labels) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (std::any_of(scores.begin(), scores.end(), [](double s) { return std::isnan(s); })) return std::nullopt;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] < scores[b]; });
  // Mann-Whitney: the sum of the positives' ranks, equal scores sharing the mean of theirs.
  double rank_sum = 0;
  double positives = 0;
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin;
    double tied_positives = 0;
    while (end < order.size() && scores[order[end]] == scores[order[begin]]) {
      tied_positives += labels[order[end]] > 0.5 ? 1 : 0;
      ++end;
    }
    rank_sum += tied_positives * (static_cast<double>(begin + end + 1) / 2);
    positives += tied_positives;
    begin = end;
  }
  const double negatives = static_cast<double>(order.size()) - positives;
  if (positives == 0 || negatives == 0) return std::nullopt;
  return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives);
}

}  // namespace ikbo::cli
