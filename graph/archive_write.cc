#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <stdlib.h>  // NOLINT: mkdtemp is POSIX
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ios>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "graph/archive.h"
#include "graph/archive_extent.h"
#include "graph/archive_samples.h"
#include "graph/archive_zip.h"
#include "graph/error.h"

namespace ikbo::graph {
namespace {

namespace fs = std::filesystem;
using caffe2::serialize::PyTorchStreamWriter;

constexpr std::uint64_t kFileFormat = 6;  // what torch.export.save sets

/// A folder beside the destination for the file while it is written. The file has its final name from the start,
/// because PyTorch's writer takes the members' folder from it. Whatever is left goes with the object.
class Scratch {
 public:
  explicit Scratch(const fs::path& destination) : destination_(destination) {
    std::string pattern = (folder_of(destination) / ".ikbo-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      fail("{}: cannot be written: {}", destination.string(), std::strerror(errno));
    }
    folder_ = pattern;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    fs::remove(file(), ignored);
    fs::remove(folder_, ignored);
  }

  fs::path file() const { return folder_ / destination_.filename(); }

  /// Puts the file in the destination's place. A reader that has the old file mapped keeps it.
  void commit() const {
    // Space may be found missing only when data reaches the disk.
    const int descriptor = ::open(file().c_str(), O_RDONLY | O_CLOEXEC);
    const bool synced = descriptor >= 0 && (::fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP);
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    if (!synced) fail("{}: cannot be written: {}", destination_.string(), std::strerror(error));
    std::error_code problem;
    fs::rename(file(), destination_, problem);
    if (problem) fail("{}: cannot be written: {}", destination_.string(), problem.message());
  }

 private:
  static fs::path folder_of(const fs::path& path) {
    return path.has_parent_path() ? path.parent_path() : fs::path(".");
  }

  fs::path destination_;
  fs::path folder_;
};

/// Names in the order of the signature, as torch.export.save has them, then those that it does not mention.
std::vector<std::string> ordered_names(const std::map<std::string, Weight>& table, const Program& program) {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const InputSpec& spec : program.input_specs) {
    if (table.contains(spec.target) && seen.insert(spec.target).second) names.push_back(spec.target);
  }
  for (const auto& [name, weight] : table) {
    if (seen.insert(name).second) names.push_back(name);
  }
  return names;
}

Json integers(const std::vector<Expr>& values, const std::string& name) {
  Json list = Json::array();
  for (const Expr& e : values) {
    const auto value = e.as_integer();
    if (!value || *value < 0) fail("weight '{}' has a size or stride '{}', expected an integer", name, e.str());
    list.push_back({{"as_int", *value}});
  }
  return list;
}

void check_extent(const Weight& weight, const std::string& name) {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  for (const Expr& e : weight.meta.sizes) sizes.push_back(*e.as_integer());
  for (const Expr& e : weight.meta.strides) strides.push_back(*e.as_integer());
  const auto offset = weight.meta.storage_offset.as_integer();
  if (weight.storage == nullptr || sizes.size() != strides.size() || !offset || *offset < 0) {
    fail("weight '{}' has no valid storage", name);
  }
  const auto end = bytes_reached(sizes, strides, *offset, dtype_bytes(weight.meta.dtype));
  if (!end || *end > weight.storage->bytes.size()) {
    fail("weight '{}', {}, does not fit its storage of {} bytes", name, describe(weight.meta),
         weight.storage->bytes.size());
  }
}

class ArchiveWriter {
 public:
  explicit ArchiveWriter(PyTorchStreamWriter& writer) : writer_(writer) { writer_.setMinVersion(kFileFormat); }

  void write(const Archive& archive) {
    const Program& program = archive.program;
    table(archive.weights, program, "data/weights/", "weight_", "data/weights/model_weights_config.json");
    table(archive.constants, program, "data/constants/", "tensor_", "data/constants/model_constants_config.json");
    record("models/model.json", emit_program(program).dump());
    const std::vector<char> samples = write_samples(archive.sample_inputs, program);
    record("data/sample_inputs/model.pt", {samples.data(), samples.size()});
    for (const auto& [name, contents] : archive.extra_files) record("extra/" + name, contents);
    record("archive_format", "pt2");
    record("archive_version", "0");
    writer_.writeEndOfFile();  // adds byteorder, the file format's version and a serial number
  }

 private:
  void record(const std::string& name, std::string_view contents) {
    writer_.writeRecord(name, contents.empty() ? "" : contents.data(), contents.size());
  }

  /// Every storage once, straight from where it lies; then the table of who views what.
  void table(const std::map<std::string, Weight>& weights, const Program& program, const std::string& folder,
             const std::string& prefix, const std::string& config_name) {
    // PyTorch reads a file as one element type, so a storage seen as two types becomes two files.
    std::map<std::tuple<const std::byte*, std::size_t, DType>, std::string> files;
    Json config = Json::object();
    for (const std::string& name : ordered_names(weights, program)) {
      const Weight& weight = weights.at(name);
      const TensorMeta& meta = weight.meta;
      Json tensor_meta = {
          {"dtype", static_cast<int>(meta.dtype)},
          {"sizes", integers(meta.sizes, name)},
          {"requires_grad", meta.requires_grad},
          {"device",
           {{"type", meta.device.type}, {"index", meta.device.index ? Json(*meta.device.index) : Json(nullptr)}}},
          {"strides", integers(meta.strides, name)},
          {"storage_offset", integers({meta.storage_offset}, name).front()},
          {"layout", meta.layout}};
      check_extent(weight, name);
      const Bytes bytes = weight.storage->bytes;
      const auto [file, is_new] = files.try_emplace({bytes.data(), bytes.size(), meta.dtype}, "");
      if (is_new) {
        file->second = fmt::format("{}{}", prefix, files.size() - 1);
        const auto width = static_cast<std::size_t>(dtype_bytes(meta.dtype));
        record(folder + file->second, as_text(bytes.first(bytes.size() - bytes.size() % width)));
      }
      config[name] = {{"path_name", file->second},
                      {"is_param", weight.is_parameter},
                      {"use_pickle", false},
                      {"tensor_meta", std::move(tensor_meta)}};
    }
    record(config_name, Json{{"config", std::move(config)}}.dump());
  }

  PyTorchStreamWriter& writer_;
};

void check_weights(const Archive& archive) {
  for (const InputSpec& spec : archive.program.input_specs) {
    const bool constant =
        spec.kind == InputKind::kTensorConstant || (spec.kind == InputKind::kBuffer && !spec.persistent);
    const bool weight = spec.kind == InputKind::kParameter || (spec.kind == InputKind::kBuffer && spec.persistent);
    if ((constant && !archive.constants.contains(spec.target)) || (weight && !archive.weights.contains(spec.target))) {
      fail("the program's {} '{}' has no contents", constant ? "constant" : "weight", spec.target);
    }
  }
}

/// One line, without the trace of C++ calls that PyTorch adds.
std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

void write_file(const Archive& archive, const fs::path& file, const std::string& name) {
  errno = 0;
  try {
    PyTorchStreamWriter writer(file.string());
    try {
      ArchiveWriter(writer).write(archive);
    } catch (...) {
      // The destructor finishes a file that is not finished, and would end the program where that fails; this does not.
      try {
        writer.writeEndOfFile();
      } catch (...) {  // the first error is the one to report
      }
      throw;
    }
  } catch (const c10::Error& e) {
    const int error = errno;
    fail("{}: cannot be written: {}", name, error != 0 ? std::strerror(error) : first_line(e));
  } catch (const std::ios_base::failure& e) {  // PyTorch's writer lets its stream's errors through
    const int error = errno;
    fail("{}: cannot be written: {}", name, error != 0 ? std::strerror(error) : e.what());
  } catch (const nlohmann::json::exception& e) {
    fail("{}: the program cannot be written: {}", name, e.what());
  } catch (const Error& e) {
    fail("{}: cannot be written: {}", name, e.what());
  }
  try {
    // The directory is what comes last: where it is whole, nothing before it was cut off.
    const auto written = MappedFile::open(file);
    const ZipDirectory directory(written->bytes(), name);
  } catch (const Error&) {
    fail("{}: cannot be written: {}", name, errno != 0 ? std::strerror(errno) : "the disk did not take all of it");
  }
}

}  // namespace

void write_archive(const Archive& archive, const fs::path& path) {
  std::error_code ignored;
  if (!path.has_filename() || fs::is_directory(path, ignored)) fail("{}: is a folder, not a file name", path.string());
  if (path.stem().empty() || path.filename().string().front() == '.') {
    fail("{}: the file's name begins with a dot, which PyTorch cannot read back", path.string());
  }
  if (path.has_parent_path() && !fs::is_directory(path.parent_path(), ignored)) {
    fail("{}: the folder {} does not exist", path.string(), path.parent_path().string());
  }
  try {
    check_weights(archive);
  } catch (const Error& e) {
    fail("{}: cannot be written: {}", path.string(), e.what());
  }
  // A link is followed, so that it still points to the archive afterwards.
  const fs::path destination = fs::is_symlink(path, ignored) ? fs::weakly_canonical(path) : path;
  const Scratch scratch(destination);
  write_file(archive, scratch.file(), path.string());
  scratch.commit();
}

}  // namespace ikbo::graph
