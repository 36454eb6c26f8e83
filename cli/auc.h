#pragma once

#include <optional>
#include <span>

namespace ikbo::cli {

/// Area under the ROC curve: the chance that a positive (label above 0.5) has a higher score than a negative, ties
/// counted half. Nothing where one of the two is missing or a score is NaN.
std::optional<double> auc(std::span<const double> scores, std::span<const double> labels);

}  // namespace ikbo::cli
