#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ikbo::graph {

using Bytes = std::span<const std::byte>;

/// A file mapped read-only. The mapping stays valid when the file is renamed over or deleted.
class MappedFile {
 public:
  /// Throws ikbo::Error where the path is missing, no regular file or empty.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  Bytes bytes() const { return {data_, size_}; }

 private:
  MappedFile(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
  const std::byte* data_;
  std::size_t size_;
};

struct ZipMember {
  Bytes bytes;  // as they lie in the file
  std::uint32_t crc32 = 0;
  bool compressed = false;
};

/// The directory of an uncompressed zip in memory: what PyTorch's archives are. PyTorch's own reader is not used
/// because it neither compares checksums nor tells them; here every offset is checked against the bytes that exist.
class ZipDirectory {
 public:
  /// Throws ikbo::Error with a message that starts with `what`.
  ZipDirectory(Bytes bytes, const std::string& what);

  /// The folder that all members are in ("model" for model.pt2), taken from the first member as PyTorch does.
  const std::string& folder() const { return folder_; }
  /// Members by name without the folder.
  const std::map<std::string, ZipMember, std::less<>>& members() const { return members_; }
  const ZipMember* find(std::string_view name) const;
  /// Throws where a member is compressed, so that `bytes` are not its contents.
  void require_stored() const;

 private:
  std::string what_;
  std::string folder_;
  std::map<std::string, ZipMember, std::less<>> members_;
};

/// The checksum that zip uses.
std::uint32_t crc32(Bytes bytes);

inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace ikbo::graph
