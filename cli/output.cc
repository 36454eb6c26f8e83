#include "cli/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>

#include "graph/error.h"

namespace ikbo::cli {
namespace {

// Characters, not bytes: continuation bytes of UTF-8 take no room.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

Table::Table(std::vector<std::string> header, std::vector<Align> align) : align_(std::move(align)) {
  align_.resize(header.size(), Align::kLeft);
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row) {
  row.resize(align_.size());
  rows_.push_back(std::move(row));
}

std::string Table::str(int indent) const {
  std::vector<std::size_t> widths(align_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  const std::string margin(static_cast<std::size_t>(indent), ' ');
  std::string text;
  const auto line = [&](const std::vector<std::string>& row) {
    std::string out = margin;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - width(row[i]), ' ');
      out += align_[i] == Align::kRight ? pad + row[i] : row[i] + pad;
      if (i + 1 < row.size()) out += "  ";
    }
    out.erase(out.find_last_not_of(' ') + 1);
    text += out + "\n";
  };
  line(rows_.front());
  std::vector<std::string> rule;
  for (const std::size_t w : widths) rule.emplace_back(w, '-');
  line(rule);
  for (std::size_t r = 1; r < rows_.size(); ++r) line(rows_[r]);
  return text;
}

Progress::Progress(std::string what) : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
}

void Progress::update(const std::string& state) {
  const auto now = Clock::now();
  if (now - start_ < std::chrono::seconds(2)) return;
  const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(10000);
  if (shown_ && now - last_ < pause) return;
  last_ = now;
  shown_ = true;
  std::fputs((terminal_ ? "\r\033[K" + what_ + ": " + state : what_ + ": " + state + "\n").c_str(), stderr);
  std::fflush(stderr);
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"kB", "MB", "GB", "TB"}) {
    if (value < 999.5) break;
    value /= 1000;
    unit = next;
  }
  return value < 9.95 ? fmt::format("{:.1f} {}", value, unit) : fmt::format("{:.0f} {}", value, unit);
}

std::string count_text(std::int64_t count) {
  std::string digits = fmt::format("{}", count);
  const std::ptrdiff_t first = count < 0 ? 1 : 0;
  for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > first; i -= 3) {
    digits.insert(static_cast<std::size_t>(i), ",");
  }
  return digits;
}

std::string number_text(double value) {
  if (value == 0) return "0";
  if (std::abs(value) < 1e-3 || std::abs(value) >= 1e6) return fmt::format("{:.1e}", value);
  return fmt::format("{:.4f}", value);
}

std::string microseconds_text(double microseconds) {
  if (microseconds < 1000) return fmt::format("{:.0f} µs", microseconds);
  if (microseconds < 1e6) return fmt::format("{:.2f} ms", microseconds / 1e3);
  return fmt::format("{:.2f} s", microseconds / 1e6);
}

std::string plural(std::int64_t count, const char* singular, const char* many) {
  if (count == 1) return fmt::format("1 {}", singular);
  return many != nullptr ? fmt::format("{} {}", count_text(count), many)
                         : fmt::format("{} {}s", count_text(count), singular);
}

void print_json(const graph::Json& json) {
  std::cout << json.dump(2) << "\n";
}

void write_json(const std::string& path, const graph::Json& json) {
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  file.close();
  if (!file) fail("{}: cannot be written", path);
}

}  // namespace ikbo::cli
