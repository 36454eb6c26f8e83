#include "cli/output.h"

#include <gtest/gtest.h>

namespace ikbo::cli {
namespace {

TEST(Table, LinesUpWithUtf8AndIndent) {
  Table table({"film", "n"}, {Table::Align::kLeft, Table::Align::kRight});
  table.add({"Amélie", "5"});
  table.add({"Heat", "1,234"});
  EXPECT_EQ(table.str(2),
            "  film        n\n"
            "  ------  -----\n"
            "  Amélie      5\n"
            "  Heat    1,234\n");
}

TEST(Text, Numbers) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1234), "1.2 kB");
  EXPECT_EQ(bytes_text(15'300'000), "15 MB");
  EXPECT_EQ(bytes_text(999'999), "1.0 MB");
  EXPECT_EQ(count_text(7), "7");
  EXPECT_EQ(count_text(1234567), "1,234,567");
  EXPECT_EQ(count_text(-1234), "-1,234");
  EXPECT_EQ(count_text(-123), "-123");
  EXPECT_EQ(plural(1, "user"), "1 user");
  EXPECT_EQ(plural(2000, "user"), "2,000 users");
  EXPECT_EQ(microseconds_text(812.4), "812 µs");
  EXPECT_EQ(microseconds_text(3210), "3.21 ms");
  EXPECT_EQ(number_text(0), "0");
  EXPECT_EQ(number_text(3.1e-7), "3.1e-07");
  EXPECT_EQ(number_text(0.81234), "0.8123");
}

}  // namespace
}  // namespace ikbo::cli
