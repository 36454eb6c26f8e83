#pragma once

namespace ikbo::runtime {

/// Nanoseconds that the eager engine adds to an operator over calling it from C++: a long chain of additions of tiny
/// tensors, through the engine and by hand, on one thread; the smallest of several measurements of each.
double operator_overhead_ns();

}  // namespace ikbo::runtime
