#include <caffe2/serialize/versions.h>
#include <fmt/ranges.h>

#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "graph/archive.h"
#include "graph/archive_extent.h"
#include "graph/archive_samples.h"
#include "graph/archive_zip.h"
#include "graph/error.h"

namespace ikbo::graph {
namespace {

// Real programs nest sub-graphs a few levels deep. Copies and visits of JSON recurse, so depth is bounded.
constexpr int kMaxJsonDepth = 400;
constexpr int kSchemaMajor = 8;
constexpr int kStridedLayout = 7;
// Vector loads of the kernels are unaligned, element access is not: the widest element has 16 bytes.
constexpr std::size_t kAlignment = 16;

constexpr const char* kModels = "models/";
constexpr const char* kWeights = "data/weights/";
constexpr const char* kConstants = "data/constants/";
constexpr const char* kExtra = "extra/";

void check_depth(std::string_view text, const std::string& what) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) fail("{}: nested more than {} levels deep", what, kMaxJsonDepth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

template <typename J>
J parse_json(Bytes bytes, const std::string& what) {
  const std::string_view text = as_text(bytes);
  check_depth(text, what);
  try {
    return J::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& e) {
    const std::string_view message = e.what();  // "[json.exception.parse_error.101] parse error at ..."
    const auto id = message.find("] ");
    fail("{}: no valid JSON: {}", what, id == std::string_view::npos ? message : message.substr(id + 2));
  }
}

/// Names what a zip without `archive_format` is, since people pass the wrong file more often than a damaged one.
[[noreturn]] void fail_foreign(const ZipDirectory& zip, const std::string& what) {
  const auto has_folder = [&](std::string_view folder) {
    const auto it = zip.members().lower_bound(folder);
    return it != zip.members().end() && it->first.starts_with(folder);
  };
  const char* kind = "a zip file with other contents";
  if (zip.find("constants.pkl") != nullptr || has_folder("code/")) {
    kind = "a TorchScript file";
  } else if (zip.find("data.pkl") != nullptr) {
    kind = "a file of torch.save";
  } else if (zip.find("serialized_exported_program.json") != nullptr) {
    kind = "an export of PyTorch 2.7 or older; load and save it with PyTorch 2.11";
  }
  fail("{}: not an archive of torch.export.save: {}", what, kind);
}

class ArchiveReader {
 public:
  explicit ArchiveReader(const std::filesystem::path& path)
      : what_(path.string()), file_(MappedFile::open(path)), zip_(file_->bytes(), what_) {}

  Archive read() {
    check_format();
    Archive archive;
    const std::string model = model_name();
    const std::string file = fmt::format("{}{}.json", kModels, model);
    const Json json = parse_json<Json>(zip_.find(file)->bytes, member(file));
    check_schema(json, member(file));
    try {
      archive.program = parse_program(json);
    } catch (const nlohmann::json::exception& e) {
      fail("{}: {}: {}", what_, file, e.what());
    } catch (const Error& e) {
      fail("{}: {}", what_, e.what());
    }
    archive.weights = payload(kWeights, model, "weights");
    archive.constants = payload(kConstants, model, "constants");
    check_signature(archive);
    if (const ZipMember* samples = zip_.find(fmt::format("data/sample_inputs/{}.pt", model))) {
      archive.sample_inputs = read_samples(samples->bytes, archive.program);
    }
    for (auto it = zip_.members().lower_bound(kExtra); it != zip_.members().end() && it->first.starts_with(kExtra);
         ++it) {
      archive.extra_files.emplace(it->first.substr(std::strlen(kExtra)), as_text(it->second.bytes));
    }
    return archive;
  }

 private:
  std::string member(const std::string& name) const { return fmt::format("{}: {}", what_, name); }

  std::string_view short_text(const char* name) const {
    const ZipMember* m = zip_.find(name);
    if (m == nullptr) return {};
    std::string_view text = as_text(m->bytes.first(std::min<std::size_t>(m->bytes.size(), 32)));
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
    return text;
  }

  void check_format() const {
    if (zip_.find("archive_format") == nullptr) fail_foreign(zip_, what_);
    zip_.require_stored();
    if (const auto format = short_text("archive_format"); format != "pt2") {
      fail("{}: archive_format is '{}', expected 'pt2'", what_, printable(format));
    }
    // Archives from before the version was written are version 0.
    if (const auto version = short_text("archive_version"); !version.empty() && version != "0") {
      fail("{}: archive_version is {}, but this program reads version 0 (PyTorch 2.11)", what_, printable(version));
    }
    if (const auto order = short_text("byteorder"); !order.empty() && order != "little") {
      fail("{}: byteorder is '{}', but only 'little' can be read", what_, printable(order));
    }
    const auto version = short_text(".data/version");
    if (!version.empty()) {
      constexpr auto newest = caffe2::serialize::kMaxSupportedFileFormatVersion;
      std::uint64_t number = 0;
      for (const char c : version.substr(0, 9)) {
        if (c < '0' || c > '9') fail("{}: .data/version is '{}', no number", what_, printable(version));
        number = number * 10 + static_cast<std::uint64_t>(c - '0');
      }
      if (number > newest) {
        fail("{}: file format version {} is newer than {}, the newest that PyTorch 2.11 reads", what_, number, newest);
      }
    }
  }

  static std::string printable(std::string_view text) {
    std::string out(text);
    for (char& c : out) {
      if (c < ' ' || c > '~') c = '?';
    }
    return out;
  }

  std::string model_name() const {
    std::vector<std::string> names;
    for (auto it = zip_.members().lower_bound(kModels); it != zip_.members().end() && it->first.starts_with(kModels);
         ++it) {
      if (it->first.ends_with(".json")) {
        names.push_back(it->first.substr(std::strlen(kModels), it->first.size() - std::strlen(kModels) - 5));
      }
    }
    if (names.empty()) {
      const auto compiled = zip_.members().lower_bound("data/aotinductor/");
      const bool aoti = compiled != zip_.members().end() && compiled->first.starts_with("data/aotinductor/");
      fail("{}: holds no exported program (models/*.json){}", what_,
           aoti ? ": it is a package compiled by AOTInductor; pass the archive it was compiled from" : "");
    }
    if (names.size() > 1) {
      fail("{}: holds {} exported programs ({}), expected one", what_, names.size(), fmt::join(names, ", "));
    }
    return names.front();
  }

  static void check_schema(const Json& model, const std::string& what) {
    const auto get = [&](const char* key) -> std::int64_t {
      const auto version = model.is_object() ? model.find("schema_version") : model.end();
      if (!model.is_object() || version == model.end() || !version->is_object()) fail("{}: no schema_version", what);
      const auto it = version->find(key);
      if (it == version->end() || !it->is_number_integer()) fail("{}: schema_version has no '{}'", what, key);
      return it->template get<std::int64_t>();
    };
    const std::int64_t major = get("major");
    const std::int64_t minor = get("minor");
    if (major != kSchemaMajor) {
      fail("{}: schema version {}.{} is {} than {}, the version this program reads; export the model with PyTorch 2.11",
           what, major, minor, major > kSchemaMajor ? "newer" : "older", kSchemaMajor);
    }
  }

  /// The tensors that data/<folder>/<model>_<kind>_config.json lists.
  std::map<std::string, Weight> payload(const std::string& folder, const std::string& model, const char* kind) {
    const std::string file = fmt::format("{}{}_{}_config.json", folder, model, kind);
    const ZipMember* config = zip_.find(file);
    if (config == nullptr) {
      if (zip_.find(fmt::format("{}{}.pt", folder, model)) != nullptr) {
        fail("{}: {} are saved in the form of an older PyTorch; load and save the archive with PyTorch 2.11", what_,
             kind);
      }
      fail("{}: member '{}' is missing", what_, file);
    }
    const auto json = parse_json<nlohmann::json>(config->bytes, member(file));
    const auto entries = json.is_object() ? json.find("config") : json.end();
    if (!json.is_object() || entries == json.end() || !entries->is_object()) fail("{}: no 'config'", member(file));
    std::map<std::string, Weight> result;
    std::map<std::string, std::pair<std::shared_ptr<const Storage>, DType>> storages;
    for (const auto& [name, entry] : entries->items()) {
      const std::string where = fmt::format("{}: {} '{}'", what_, kind[0] == 'w' ? "weight" : "constant", name);
      result.emplace(name, weight(entry, folder, where, storages));
    }
    return result;
  }

  Weight weight(const nlohmann::json& entry, const std::string& folder, const std::string& where,
                std::map<std::string, std::pair<std::shared_ptr<const Storage>, DType>>& storages) {
    const auto get = [&](const nlohmann::json& json, const char* key) -> const nlohmann::json& {
      if (!json.is_object()) fail("{}: its entry is no object", where);
      const auto it = json.find(key);
      if (it == json.end()) fail("{}: its entry has no '{}'", where, key);
      return *it;
    };
    const nlohmann::json& path_json = get(entry, "path_name");
    if (!path_json.is_string()) fail("{}: its path_name is no string", where);
    const std::string path = path_json.get<std::string>();
    const nlohmann::json& pickled = get(entry, "use_pickle");
    if (path.starts_with("custom_obj_")) {
      fail("{}: a custom object (a TorchBind class), which is not supported", where);
    }
    if (!pickled.is_boolean() || pickled.get<bool>()) {
      fail("{}: a pickled tensor subclass, which is not supported; make it a plain tensor before torch.export.export",
           where);
    }
    Weight result;
    const nlohmann::json& parameter = get(entry, "is_param");
    result.is_parameter = parameter.is_boolean() && parameter.get<bool>();
    result.meta = meta(get(entry, "tensor_meta"), where);
    const ZipMember* data = zip_.find(folder + path);
    if (data == nullptr) fail("{}: its data, member '{}{}', is missing", where, folder, path);
    check_extent(result.meta, data->bytes.size(), where);
    auto [it, is_new] = storages.try_emplace(path, nullptr, result.meta.dtype);
    if (is_new) it->second.first = storage(data->bytes);
    if (it->second.second != result.meta.dtype) {
      fail("{}: {} shares '{}' with a weight of {}", where, dtype_name(result.meta.dtype), path,
           dtype_name(it->second.second));
    }
    result.storage = it->second.first;
    return result;
  }

  std::shared_ptr<const Storage> storage(Bytes bytes) const {
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % kAlignment == 0) {
      return std::make_shared<const Storage>(Storage{bytes, file_});
    }
    // PyTorch aligns members to 64 bytes; other zip programs do not.
    const auto copy = std::make_shared<std::vector<std::max_align_t>>((bytes.size() + sizeof(std::max_align_t) - 1) /
                                                                      sizeof(std::max_align_t));
    if (!bytes.empty()) std::memcpy(copy->data(), bytes.data(), bytes.size());
    return std::make_shared<const Storage>(
        Storage{{reinterpret_cast<const std::byte*>(copy->data()), bytes.size()}, copy});
  }

  static TensorMeta meta(const nlohmann::json& json, const std::string& where) {
    const auto get = [&](const nlohmann::json& object, const char* key) -> const nlohmann::json& {
      const auto it = object.is_object() ? object.find(key) : object.end();
      if (!object.is_object() || it == object.end()) fail("{}: its tensor_meta has no '{}'", where, key);
      return *it;
    };
    const auto number = [&](const nlohmann::json& value, const char* key) {
      constexpr auto max = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > max)) {
        fail("{}: its {} is no integer", where, key);
      }
      const auto result = value.get<std::int64_t>();
      if (result < 0) fail("{}: its {} is negative: {}", where, key, result);
      return result;
    };
    const auto list = [&](const char* key) {
      std::vector<Expr> values;
      const nlohmann::json& array = get(json, key);
      if (!array.is_array()) fail("{}: its {} are no list", where, key);
      for (const nlohmann::json& v : array) values.emplace_back(number(get(v, "as_int"), key));
      return values;
    };
    TensorMeta m;
    const std::int64_t code = number(get(json, "dtype"), "dtype");
    if (code > 1000 || dtype_bytes(static_cast<DType>(code)) == 0) {
      fail("{}: its element type has the code {}, which is not supported", where, code);
    }
    m.dtype = static_cast<DType>(code);
    m.sizes = list("sizes");
    m.strides = list("strides");
    if (m.sizes.size() != m.strides.size()) {
      fail("{}: it has {} sizes but {} strides", where, m.sizes.size(), m.strides.size());
    }
    if (m.sizes.size() > 64) fail("{}: it has {} dimensions, more than 64", where, m.sizes.size());
    m.storage_offset = number(get(get(json, "storage_offset"), "as_int"), "storage_offset");
    if (number(get(json, "layout"), "layout") != kStridedLayout) {
      fail("{}: it is not strided (layout {}), which is not supported", where, get(json, "layout").dump());
    }
    const nlohmann::json& grad = get(json, "requires_grad");
    m.requires_grad = grad.is_boolean() && grad.get<bool>();
    const nlohmann::json& device = get(json, "device");
    const nlohmann::json& type = get(device, "type");
    if (!type.is_string()) fail("{}: its device is no string", where);
    m.device.type = type.get<std::string>();
    if (const auto index = device.find("index"); index != device.end() && index->is_number_integer()) {
      const std::int64_t value = number(*index, "device index");
      if (value > 1000) fail("{}: its device index is {}", where, value);
      m.device.index = static_cast<int>(value);
    }
    return m;
  }

  /// Every element must lie within the storage.
  static void check_extent(const TensorMeta& meta, std::size_t bytes, const std::string& where) {
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    for (const Expr& e : meta.sizes) sizes.push_back(*e.as_integer());
    for (const Expr& e : meta.strides) strides.push_back(*e.as_integer());
    const auto end = bytes_reached(sizes, strides, *meta.storage_offset.as_integer(), dtype_bytes(meta.dtype));
    if (!end) fail("{}: {} is larger than 64 bits can address", where, describe(meta));
    if (*end > bytes) fail("{}: {} needs {} bytes of data, but its file has {}", where, describe(meta), *end, bytes);
  }

  void check_signature(const Archive& archive) const {
    for (const InputSpec& spec : archive.program.input_specs) {
      const bool buffer = spec.kind == InputKind::kBuffer;
      const bool constant = spec.kind == InputKind::kTensorConstant || (buffer && !spec.persistent);
      if (spec.kind == InputKind::kCustomObject) {
        fail("{}: the program takes a custom object (a TorchBind class), which is not supported: {}", what_,
             spec.json.dump());
      }
      if (spec.kind != InputKind::kParameter && !buffer && !constant) continue;
      const auto& table = constant ? archive.constants : archive.weights;
      const auto it = table.find(spec.target);
      const char* kind = constant ? "constant" : buffer ? "buffer" : "parameter";
      if (it == table.end()) fail("{}: the program's {} '{}' is not in the archive", what_, kind, spec.target);
      const auto* value = std::get_if<TensorArg>(&spec.value);
      const auto declared =
          value == nullptr ? archive.program.graph.tensors.end() : archive.program.graph.tensors.find(value->name);
      if (declared == archive.program.graph.tensors.end()) {
        fail("{}: the program's {} '{}' has no shape in the graph", what_, kind, spec.target);
      }
      const TensorMeta& stored = it->second.meta;
      if (declared->second.dtype != stored.dtype || declared->second.sizes != stored.sizes) {
        fail("{}: the program's {} '{}' is {}, but the archive holds {}", what_, kind, spec.target,
             describe(declared->second), describe(stored));
      }
    }
  }

  std::string what_;
  std::shared_ptr<const MappedFile> file_;
  ZipDirectory zip_;
};

}  // namespace

Archive read_archive(const std::filesystem::path& path) {
  Archive archive = ArchiveReader(path).read();
  archive.path = path;
  return archive;
}

std::vector<std::string> check_archive(const std::filesystem::path& path,
                                       const std::function<void(std::size_t, std::size_t)>& progress) {
  const auto file = MappedFile::open(path);
  const ZipDirectory zip(file->bytes(), path.string());
  zip.require_stored();
  std::vector<std::string> different;
  std::size_t done = 0;
  for (const auto& [name, member] : zip.members()) {
    if (crc32(member.bytes) != member.crc32) different.push_back(name);
    if (progress) progress(++done, zip.members().size());
  }
  return different;
}

}  // namespace ikbo::graph
