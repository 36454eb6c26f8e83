// Reads archives that were damaged at random. Reading one may succeed or throw ikbo::Error; anything else is a fault.
// Where reading succeeds, what a user does next must hold as well: its inputs are named, its weights are touched, it is
// written and read back.
#include <ATen/core/Tensor.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "graph/archive.h"
#include "graph/archive_zip.h"
#include "graph/error.h"
#include "small_archive.h"

namespace {

using namespace ikbo;         // NOLINT
using namespace ikbo::graph;  // NOLINT
using testing::Members;

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t end) { return end == 0 ? 0 : random_() % end; }
  bool chance(std::size_t one_in) { return below(one_in) == 0; }

  /// Flips, overwrites, cuts, repeats and inserts bytes.
  void bytes(std::string& data) {
    for (std::size_t i = 1 + below(4); i > 0 && !data.empty(); --i) {
      const std::size_t at = below(data.size());
      const std::size_t length = 1 + below(std::min<std::size_t>(data.size() - at, 64));
      switch (below(7)) {
        case 0:
          data[at] = static_cast<char>(data[at] ^ (1 << below(8)));
          break;
        case 1:
          data[at] = static_cast<char>(random_());
          break;
        case 2:
          data.resize(at);
          break;
        case 3:
          data.erase(at, length);
          break;
        case 4:
          data.insert(below(data.size()), data.substr(at, length));
          break;
        case 5:
          number(data, at);
          break;
        default:
          data.insert(at, 1 + below(8), static_cast<char>(random_()));
          break;
      }
    }
  }

  /// Bytes near the end, where a zip keeps its directory.
  void directory(std::string& data) {
    const std::size_t tail = std::min<std::size_t>(data.size(), 2000);
    std::string end = data.substr(data.size() - tail);
    bytes(end);
    data.replace(data.size() - tail, tail, end);
  }

  /// Changes one value somewhere in the tree, most often to something close to what belongs there.
  void json(Json& root) {
    Json* at = &root;
    while (at->is_structured() && !at->empty() && !chance(12)) {
      at = &*std::next(at->begin(), static_cast<std::ptrdiff_t>(below(at->size())));
    }
    switch (below(9)) {
      case 0:
        *at = odd_value();
        break;
      case 1:
        if (at->is_structured() && !at->empty()) erase(*at);
        break;
      case 2:
        if (at->is_array()) at->push_back(at->empty() ? odd_value() : Json(at->back()));
        break;
      case 3:
        if (at->is_object()) (*at)[odd_text()] = odd_value();
        break;
      case 4:
        if (at->is_string()) text(*at);
        break;
      case 5:
        if (at->is_array() && at->size() > 1) std::swap(at->front(), at->back());
        break;
      case 6:
        swap_with(root, *at);
        break;
      default:
        if (at->is_number())
          *at = odd_number();
        else
          text(*at);
        break;
    }
  }

 private:
  void number(std::string& data, std::size_t at) {
    constexpr std::uint64_t kNumbers[] = {0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, ~0ULL, ~0ULL >> 1};
    const std::uint64_t value = kNumbers[below(std::size(kNumbers))];
    const std::size_t width = std::size_t{1} << below(4);
    for (std::size_t i = 0; i < width && at + i < data.size(); ++i) data[at + i] = static_cast<char>(value >> (8 * i));
  }
  Json odd_number() {
    const Json numbers = {0,       1,         -1,        2,         7,          13,    64, 255,
                          1 << 20, INT32_MAX, INT64_MAX, INT64_MIN, UINT64_MAX, 1e300, 0.5};
    return numbers[below(numbers.size())];
  }
  std::string odd_text() {
    const std::vector<std::string> texts{"",
                                         "x",
                                         "as_int",
                                         "as_tensor",
                                         "name",
                                         "../../x",
                                         "weight_0",
                                         "Infinity",
                                         "Mul(Integer(9223372036854775807), Symbol('s0'))",
                                         "Pow(Symbol('s0'), Integer(99))",
                                         "Add(Symbol('s0'), Integer(-1))",
                                         "FloorDiv(Symbol('s0'), Integer(0))",
                                         "((((((("};
    return texts[below(texts.size())];
  }
  Json odd_value() {
    switch (below(7)) {
      case 0:
        return nullptr;
      case 1:
        return true;
      case 2:
        return odd_number();
      case 3:
        return odd_text();
      case 4:
        return Json::array();
      case 5:
        return Json::object();
      default:
        return Json::array({odd_number(), odd_text(), Json::object()});
    }
  }
  void text(Json& json) {
    if (!json.is_string()) return;
    std::string value = json.get<std::string>();
    // A JSON text or an expression within a string is changed as bytes; what is no UTF-8 is cut off.
    bytes(value);
    for (char& c : value) c = static_cast<char>(c & 0x7f);
    json = value;
  }
  void erase(Json& json) {
    const auto at = below(json.size());
    json.erase(std::next(json.begin(), static_cast<std::ptrdiff_t>(at)));
  }
  void swap_with(Json& root, Json& at) {
    Json* other = &root;
    while (other->is_structured() && !other->empty() && !chance(8)) {
      other = &*std::next(other->begin(), static_cast<std::ptrdiff_t>(below(other->size())));
    }
    const Json copy = *other;
    if (copy.dump().size() < 4096) at = copy;  // bounded, since a tree may come into itself
  }

  std::mt19937_64 random_;
};

/// Nothing where `bytes` were damaged before.
Members members_of(const std::string& bytes) {
  Members members;
  try {
    const ZipDirectory zip({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, "seed");
    for (const auto& [name, member] : zip.members()) {
      if (name.starts_with(".data/") || name == "byteorder") continue;  // the writer adds them
      members.emplace(name, as_text(member.bytes));
    }
  } catch (const Error&) {
    members.clear();
  }
  return members;
}

std::string damaged(const std::string& seed, Mutator& mutate) {
  if (mutate.chance(4)) {
    std::string bytes = seed;
    mutate.bytes(bytes);
    return bytes;
  }
  if (mutate.chance(4)) {
    std::string bytes = seed;
    mutate.directory(bytes);
    return bytes;
  }
  Members members = members_of(seed);
  for (std::size_t i = 1 + mutate.below(3); i > 0; --i) {
    auto member = std::next(members.begin(), static_cast<std::ptrdiff_t>(mutate.below(members.size())));
    const bool model = mutate.chance(2);
    if (model) member = members.find("models/model.json");
    if (member == members.end()) continue;
    if (member->first.ends_with(".json") && !mutate.chance(20)) {
      Json json = Json::parse(member->second, nullptr, false);
      if (json.is_discarded()) continue;
      for (std::size_t n = 1 + mutate.below(3); n > 0; --n) mutate.json(json);
      member->second = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    } else if (member->first.ends_with("model.pt") && !member->second.empty() && !mutate.chance(4)) {
      Members samples = members_of(member->second);  // a file of torch.save
      if (samples.empty()) continue;
      auto inner = std::next(samples.begin(), static_cast<std::ptrdiff_t>(mutate.below(samples.size())));
      if (!mutate.chance(3) && samples.contains("data.pkl")) inner = samples.find("data.pkl");
      mutate.bytes(inner->second);
      member->second = testing::zip(samples);
    } else if (mutate.chance(6)) {
      members.erase(member);
    } else {
      mutate.bytes(member->second);
    }
    if (members.empty()) break;
  }
  return testing::zip(members);
}

double touch(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.numel() > 1'000'000) return 0;
  double sum = 0;
  const auto contiguous = tensor.contiguous();
  const auto* bytes = static_cast<const unsigned char*>(contiguous.const_data_ptr());
  for (std::size_t i = 0; i < contiguous.nbytes(); ++i) sum += bytes[i];
  return sum;
}

/// True where the archive was read.
bool use(const std::filesystem::path& path, const std::filesystem::path& copy) {
  try {
    check_archive(path);
  } catch (const Error&) {
  }
  Archive archive;
  try {
    archive = read_archive(path);
  } catch (const Error&) {
    return false;
  }
  volatile double sink = 0;
  for (const auto* table : {&archive.weights, &archive.constants}) {
    for (const auto& [name, weight] : *table) sink = sink + touch(weight_tensor(weight));
  }
  for (const at::Tensor& sample : archive.sample_inputs) sink = sink + touch(sample);
  try {
    for (const UserInput& input : user_inputs(archive.program)) sink = sink + static_cast<double>(input.name.size());
    TensorMeta meta;
    meta.dtype = DType::kInt32;
    meta.sizes = {4};
    meta.strides = {1};
    archive.program.graph.tensors.emplace("candidate_to_user", meta);
    append_user_input(archive.program, "candidate_to_user");
    archive.sample_inputs.clear();
  } catch (const Error&) {
  }
  try {
    write_archive(archive, copy);
    const Archive again = read_archive(copy);
    if (again.weights.size() != archive.weights.size()) throw std::logic_error("weights were lost");
  } catch (const Error&) {
  }
  return true;
}

int fuzz(const std::string& seed_folder, std::size_t count, std::uint64_t seed) {
  const testing::TemporaryFolder folder;
  std::vector<std::string> seeds{testing::zip(testing::small_members())};
  if (!seed_folder.empty()) {
    for (const auto& entry : std::filesystem::directory_iterator(seed_folder)) {
      if (entry.path().extension() != ".pt2" || entry.file_size() > (8 << 20)) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
  }
  std::size_t read = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Mutator mutate(seed + i);
    const std::string bytes = damaged(seeds[i % seeds.size()], mutate);
    const auto path = folder.file("damaged.pt2", bytes);
    if (std::getenv("IKBO_FUZZ_KEEP") != nullptr) {  // kept where a fault ends the program
      std::ofstream(std::getenv("IKBO_FUZZ_KEEP"), std::ios::binary) << bytes;
    }
    try {
      read += use(path, folder.path() / "copy.pt2") ? 1 : 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed + i), e.what());
      return 1;
    }
  }
  std::printf("%zu archives from %zu seeds: %zu read, %zu refused\n", count, seeds.size(), read, count - read);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: fuzz_archive FOLDER COUNT SEED\n", stderr);
    return 2;
  }
  return fuzz(argv[1], std::strtoul(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10));
}
