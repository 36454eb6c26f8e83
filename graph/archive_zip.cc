#include "graph/archive_zip.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>

#include "graph/error.h"

namespace ikbo::graph {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50;
constexpr std::uint32_t kDirectoryEntry = 0x02014b50;
constexpr std::uint32_t kDirectoryEnd = 0x06054b50;
constexpr std::uint32_t kDirectoryEnd64 = 0x06064b50;
constexpr std::uint32_t kLocator64 = 0x07064b50;
constexpr std::size_t kLocalHeaderSize = 30;
constexpr std::size_t kDirectoryEntrySize = 46;
constexpr std::size_t kDirectoryEndSize = 22;
constexpr std::size_t kDirectoryEnd64Size = 56;
constexpr std::size_t kLocator64Size = 20;
constexpr std::uint64_t kSeeExtra = 0xffffffff;  // the value did not fit and stands in the zip64 extra field

/// Little-endian numbers out of bytes; says whether they are there.
class Cursor {
 public:
  explicit Cursor(Bytes bytes) : bytes_(bytes) {}
  bool has(std::uint64_t offset, std::uint64_t count) const {
    return offset <= bytes_.size() && count <= bytes_.size() - offset;
  }
  template <typename T>
  T read(std::uint64_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }
  std::uint16_t u16(std::uint64_t offset) const { return read<std::uint16_t>(offset); }
  std::uint32_t u32(std::uint64_t offset) const { return read<std::uint32_t>(offset); }
  std::uint64_t u64(std::uint64_t offset) const { return read<std::uint64_t>(offset); }

 private:
  Bytes bytes_;
};

struct DirectoryPlace {
  std::uint64_t offset;
  std::uint64_t size;
  std::uint64_t count;
};

DirectoryPlace find_directory(const Cursor& cursor, std::uint64_t file_size, const std::string& what) {
  if (file_size < kDirectoryEndSize) fail("{}: truncated, or no zip archive: {} bytes", what, file_size);
  // The end record is followed by a comment of at most 65535 bytes.
  const std::uint64_t last = file_size - kDirectoryEndSize;
  const std::uint64_t first = last > 0xffff ? last - 0xffff : 0;
  std::uint64_t end = last + 1;
  for (std::uint64_t at = last + 1; at-- > first;) {
    if (cursor.u32(at) == kDirectoryEnd) {
      end = at;
      break;
    }
  }
  if (end > last) {
    fail("{}: {}", what,
         cursor.u32(0) == kLocalHeader ? "truncated: the zip directory at its end is missing"
                                       : "not an archive of torch.export.save: no zip file");
  }
  DirectoryPlace place{cursor.u32(end + 16), cursor.u32(end + 12), cursor.u16(end + 10)};
  if (end >= kLocator64Size && cursor.u32(end - kLocator64Size) == kLocator64) {
    const std::uint64_t end64 = cursor.u64(end - kLocator64Size + 8);
    if (!cursor.has(end64, kDirectoryEnd64Size) || cursor.u32(end64) != kDirectoryEnd64) {
      fail("{}: corrupt: its zip64 directory record is not where it should be", what);
    }
    place = {cursor.u64(end64 + 48), cursor.u64(end64 + 40), cursor.u64(end64 + 32)};
  }
  if (!cursor.has(place.offset, place.size)) fail("{}: truncated or corrupt: its zip directory is cut off", what);
  return place;
}

/// Sizes and the offset that did not fit into 32 bits stand in the extra field 1, in this order.
void read_zip64_extra(const Cursor& cursor, std::uint64_t at, std::uint64_t end, std::array<std::uint64_t*, 3> values) {
  while (at + 4 <= end) {
    const std::uint16_t id = cursor.u16(at);
    const std::uint64_t size = cursor.u16(at + 2);
    at += 4;
    if (size > end - at) return;
    if (id == 1) {
      std::uint64_t field = at;
      for (std::uint64_t* value : values) {
        if (*value != kSeeExtra) continue;
        if (field + 8 > at + size) return;
        *value = cursor.u64(field);
        field += 8;
      }
      return;
    }
    at += size;
  }
}

// Slicing by eight: eight tables let the loop take eight bytes a step, so that checking is bound by the disk.
constexpr auto kCrcTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? 0xedb88320U ^ (c >> 1) : c >> 1;
    tables[0][i] = c;
  }
  for (std::size_t t = 1; t < 8; ++t) {
    for (std::size_t i = 0; i < 256; ++i) {
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xff];
    }
  }
  return tables;
}();

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail("{}: cannot be opened: {}", path.string(), std::strerror(errno));
  struct Closer {
    int descriptor;
    ~Closer() { ::close(descriptor); }
  } closer{descriptor};
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail("{}: cannot be read: {}", path.string(), std::strerror(errno));
  if (S_ISDIR(status.st_mode)) fail("{}: is a folder, not an archive", path.string());
  if (!S_ISREG(status.st_mode)) fail("{}: is no regular file", path.string());
  if (status.st_size == 0) fail("{}: the file is empty", path.string());
  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (data == MAP_FAILED) fail("{}: cannot be mapped: {}", path.string(), std::strerror(errno));
  return std::shared_ptr<const MappedFile>(new MappedFile(static_cast<const std::byte*>(data), size));
}

MappedFile::~MappedFile() {
  ::munmap(const_cast<std::byte*>(data_), size_);
}

ZipDirectory::ZipDirectory(Bytes bytes, const std::string& what) : what_(what) {
  const Cursor cursor(bytes);
  const DirectoryPlace place = find_directory(cursor, bytes.size(), what);
  const std::uint64_t end = place.offset + place.size;
  if (place.count > place.size / kDirectoryEntrySize) {
    fail("{}: corrupt: its zip directory has {} bytes for {} members", what, place.size, place.count);
  }
  std::uint64_t at = place.offset;
  for (std::uint64_t i = 0; i < place.count; ++i) {
    if (end - at < kDirectoryEntrySize || cursor.u32(at) != kDirectoryEntry) {
      fail("{}: corrupt: member {} of its zip directory is damaged", what, i);
    }
    ZipMember member;
    member.compressed = cursor.u16(at + 10) != 0;
    member.crc32 = cursor.u32(at + 16);
    std::uint64_t stored = cursor.u32(at + 20);
    std::uint64_t size = cursor.u32(at + 24);
    const std::uint64_t name_size = cursor.u16(at + 28);
    const std::uint64_t extra_size = cursor.u16(at + 30);
    const std::uint64_t comment_size = cursor.u16(at + 32);
    std::uint64_t header = cursor.u32(at + 42);
    at += kDirectoryEntrySize;
    if (end - at < name_size + extra_size + comment_size) {
      fail("{}: corrupt: member {} of its zip directory is cut off", what, i);
    }
    const std::string name(as_text(bytes.subspan(at, name_size)));
    read_zip64_extra(cursor, at + name_size, at + name_size + extra_size, {&size, &stored, &header});
    at += name_size + extra_size + comment_size;

    if (name.empty()) fail("{}: corrupt: member {} of its zip directory has no name", what, i);
    if (i == 0) folder_ = name.substr(0, name.find('/'));
    if (name.back() == '/' && size == 0) continue;  // a folder's own entry, as other zip programs write
    if (!cursor.has(header, kLocalHeaderSize) || cursor.u32(header) != kLocalHeader) {
      fail("{}: truncated or corrupt: member '{}' is not where the zip directory says", what, name);
    }
    // Alignment is padded with the local header's own extra field, so its length differs from the directory's.
    const std::uint64_t data = header + kLocalHeaderSize + cursor.u16(header + 26) + cursor.u16(header + 28);
    if ((!member.compressed && stored != size) || !cursor.has(data, stored)) {
      fail("{}: truncated or corrupt: member '{}' with {} bytes at offset {} does not fit the file's {} bytes", what,
           name, stored, data, bytes.size());
    }
    member.bytes = bytes.subspan(data, stored);
    if (name.size() <= folder_.size() || name.compare(0, folder_.size(), folder_) != 0 || name[folder_.size()] != '/') {
      continue;  // PyTorch does not see members outside the first one's folder either
    }
    const std::string key = name.substr(folder_.size() + 1);
    if (!members_.emplace(key, member).second) fail("{}: corrupt: it has two members '{}'", what, name);
  }
}

const ZipMember* ZipDirectory::find(std::string_view name) const {
  const auto it = members_.find(name);
  return it == members_.end() ? nullptr : &it->second;
}

void ZipDirectory::require_stored() const {
  for (const auto& [name, member] : members_) {
    if (!member.compressed) continue;
    fail("{}: member '{}' is compressed, but archives of torch.export.save are not; save it with torch.export.save",
         what_, name);
  }
}

std::uint32_t crc32(Bytes bytes) {
  const auto& t = kCrcTables;
  std::uint32_t c = 0xffffffffU;
  const std::byte* p = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= c;
    c = t[7][word & 0xff] ^ t[6][(word >> 8) & 0xff] ^ t[5][(word >> 16) & 0xff] ^ t[4][(word >> 24) & 0xff] ^
        t[3][(word >> 32) & 0xff] ^ t[2][(word >> 40) & 0xff] ^ t[1][(word >> 48) & 0xff] ^ t[0][word >> 56];
  }
  for (; left > 0; --left, ++p) c = t[0][(c ^ static_cast<std::uint32_t>(*p)) & 0xff] ^ (c >> 8);
  return ~c;
}

}  // namespace ikbo::graph
