#include "graph/archive.h"
#include "graph/error.h"
namespace ikbo::graph {
void write_archive(const Archive&, const std::filesystem::path& path) {
  fail("{}: writing is not there yet", path.string());
}
}  // namespace ikbo::graph
