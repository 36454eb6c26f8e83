#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "graph/program.h"

namespace ikbo::cli {

/// Columns that line up. Cells may hold UTF-8.
class Table {
 public:
  enum class Align { kLeft, kRight };
  explicit Table(std::vector<std::string> header, std::vector<Align> align = {});
  void add(std::vector<std::string> row);
  /// Every line starts with `indent` spaces.
  std::string str(int indent = 0) const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<Align> align_;
};

/// Says on stderr how far a long piece of work is: nothing before two seconds have passed; on a terminal one line that
/// is written over, elsewhere a line every ten seconds.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(const std::string& state);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_{};
  bool terminal_;
  bool shown_ = false;
};

std::string bytes_text(std::int64_t bytes);                                                // "12.3 MB"
std::string count_text(std::int64_t count);                                                // "12,345"
std::string number_text(double value);                                                     // "0.8123", "3.1e-07"
std::string microseconds_text(double microseconds);                                        // "812 µs", "3.21 ms"
std::string plural(std::int64_t count, const char* singular, const char* many = nullptr);  // "3 users"
void print_json(const graph::Json& json);
void write_json(const std::string& path, const graph::Json& json);

}  // namespace ikbo::cli
