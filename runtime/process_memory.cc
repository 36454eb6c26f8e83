#include "runtime/process_memory.h"

#include <cstdlib>  // defines __GLIBC__ where it is glibc
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace ikbo::runtime {

void keep_freed_memory() {
#ifdef __GLIBC__
  // Blocks up to a gigabyte come from the heap and not from a mapping of their own; older versions refuse as much.
  if (mallopt(M_MMAP_THRESHOLD, 1 << 30) == 0) mallopt(M_MMAP_THRESHOLD, 1 << 25);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

}  // namespace ikbo::runtime
