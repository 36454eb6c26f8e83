#include "graph/archive.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <functional>

#include "graph/archive_zip.h"
#include "graph/error.h"
#include "small_archive.h"

namespace ikbo::graph {
namespace {

using testing::Members;
using testing::small_members;
using testing::small_model;
using testing::small_weight;
using testing::TemporaryFolder;

std::string config(const Json& weights) {
  return Json{{"config", weights}}.dump();
}

/// The message that reading `bytes` ends with; empty where it is read.
std::string refusal(const std::string& bytes, const std::string& name = "m.pt2") {
  const TemporaryFolder folder;
  try {
    read_archive(folder.file(name, bytes));
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string refusal_with(const std::function<void(Members&)>& change) {
  Members members = small_members();
  change(members);
  return refusal(testing::zip(members));
}

void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "message: '" << message << "', expected '" << part << "'";
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(ReadArchive, SmallestProgram) {
  const TemporaryFolder folder;
  const Archive archive = read_archive(folder.file("m.pt2", testing::zip(small_members())));
  ASSERT_EQ(archive.weights.size(), 1);
  const Weight& w = archive.weights.at("w");
  EXPECT_TRUE(w.is_parameter);
  EXPECT_TRUE(w.meta.requires_grad);
  EXPECT_TRUE(at::equal(weight_tensor(w), at::arange(1, 7, at::kFloat).view({2, 3})));
  EXPECT_TRUE(archive.sample_inputs.empty());
  EXPECT_TRUE(archive.extra_files.empty());
}

TEST(ReadArchive, FilesThatAreNoArchives) {
  const TemporaryFolder folder;
  const auto message = [](const std::filesystem::path& path) -> std::string {
    try {
      read_archive(path);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  expect_says(message(folder.path() / "none.pt2"), "none.pt2: cannot be opened: No such file");
  expect_says(message(folder.path()), "is a folder");
  expect_says(message("/dev/null"), "no regular file");
  expect_says(refusal(""), "m.pt2: the file is empty");
  expect_says(refusal("hello"), "no zip archive: 5 bytes");
  expect_says(refusal(std::string(1000, 'x')), "not an archive of torch.export.save: no zip file");
  expect_says(refusal(testing::zip({{"data.pkl", "x"}})), "a file of torch.save");
  expect_says(refusal(testing::zip({{"data.pkl", "x"}, {"constants.pkl", "x"}})), "a TorchScript file");
  expect_says(refusal(testing::zip({{"code/__torch__.py", "x"}})), "a TorchScript file");
  expect_says(refusal(testing::zip({{"serialized_exported_program.json", "{}"}})), "PyTorch 2.7 or older");
  expect_says(refusal(testing::zip({{"a", "x"}})), "a zip file with other contents");
  expect_says(refusal(testing::zip({{"archive_format", "pt2"}, {"data/aotinductor/model/a.so", "x"}})), "AOTInductor");
}

TEST(ReadArchive, EveryTruncationIsRefused) {
  const std::string whole = testing::zip(small_members());
  for (std::size_t size = 0; size < whole.size(); size += 37) EXPECT_NE(refusal(whole.substr(0, size)), "") << size;
  expect_says(refusal(whole.substr(0, whole.size() / 2)), "truncated: the zip directory at its end is missing");
}

TEST(ReadArchive, Versions) {
  const auto set = [](const char* name, const char* value) {
    return refusal_with([&](Members& m) { m[name] = value; });
  };
  expect_says(set("archive_format", "pt3"), "archive_format is 'pt3', expected 'pt2'");
  expect_says(set("archive_version", "1"), "archive_version is 1, but this program reads version 0");
  const auto schema = [](const Json& version) {
    return refusal_with([&](Members& m) {
      Json model = small_model();
      model["schema_version"] = version;
      m["models/model.json"] = model.dump();
    });
  };
  EXPECT_EQ(schema({{"major", 8}, {"minor", 99}}), "");
  expect_says(schema({{"major", 9}, {"minor", 1}}), "schema version 9.1 is newer than 8");
  expect_says(schema({{"major", 7}, {"minor", 3}}), "schema version 7.3 is older than 8");
  expect_says(schema({{"major", "x"}}), "schema_version has no 'major'");
  expect_says(schema(nullptr), "no schema_version");
}

TEST(ReadArchive, Members) {
  expect_says(refusal_with([](Members& m) { m.erase("models/model.json"); }), "holds no exported program");
  expect_says(refusal_with([](Members& m) { m["models/other.json"] = "{}"; }),
              "holds 2 exported programs (model, other)");
  expect_says(refusal_with([](Members& m) { m.erase("data/weights/model_weights_config.json"); }),
              "member 'data/weights/model_weights_config.json' is missing");
  expect_says(refusal_with([](Members& m) {
                m.erase("data/constants/model_constants_config.json");
                m["data/constants/model.pt"] = "x";
              }),
              "constants are saved in the form of an older PyTorch");
  expect_says(refusal_with([](Members& m) { m.erase("data/weights/weight_0"); }),
              "weight 'w': its data, member 'data/weights/weight_0', is missing");
  EXPECT_EQ(refusal_with([](Members& m) { m.erase("data/sample_inputs/model.pt"); }), "");
  EXPECT_EQ(refusal_with([](Members& m) { m["data/sample_inputs/model.pt"] = "no zip"; }), "");
  EXPECT_EQ(refusal_with([](Members& m) { m.erase("archive_version"); }), "");
}

TEST(ReadArchive, Json) {
  const auto model = [](const std::string& text) {
    return refusal_with([&](Members& m) { m["models/model.json"] = text; });
  };
  expect_says(model("{"), "models/model.json: no valid JSON");
  expect_says(model(""), "models/model.json: no valid JSON");
  expect_says(model("[]"), "no schema_version");
  expect_says(model(std::string(1'000'000, '[')), "nested more than");
  expect_says(model("{\"a\": \"\xff\"}"), "no valid JSON");
  expect_says(refusal_with([](Members& m) { m["data/weights/model_weights_config.json"] = "[1]"; }), "no 'config'");
}

TEST(ReadArchive, WeightsThatDoNotFit) {
  const auto with = [](const Json& weight) {
    return refusal_with([&](Members& m) { m["data/weights/model_weights_config.json"] = config({{"w", weight}}); });
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_EQ(with(small_weight({2, 3}, {3, 1})), "");
  EXPECT_EQ(with(small_weight({2, 3}, {1, 2})), "");
  expect_says(with(small_weight({2, 3}, {3, 1}, 1)), "needs 28 bytes of data, but its file has 24");
  expect_says(with(small_weight({2, 3}, {4, 1})), "weight 'w': float32 [2, 3] needs 28 bytes");
  expect_says(with(small_weight({2, 3}, {kHuge, 1})), "larger than 64 bits can address");
  expect_says(with(small_weight({kHuge, kHuge}, {0, 0})), "larger than 64 bits can address");
  expect_says(with(small_weight({2, 3}, {3, 1}, INT64_MAX)), "larger than 64 bits can address");
  expect_says(with(small_weight({2, 3}, {3, -1})), "its strides is negative: -1");
  expect_says(with(small_weight({2, 3}, {3})), "it has 2 sizes but 1 strides");
  expect_says(with(small_weight({3, 2}, {2, 1})),
              "the program's parameter 'w' is float32 [2, 3], but the archive holds float32 [3, 2]");
  Json weight = small_weight({2, 3}, {3, 1});
  weight["use_pickle"] = true;
  expect_says(with(weight), "weight 'w': a pickled tensor subclass");
  weight = small_weight({2, 3}, {3, 1});
  weight["tensor_meta"]["dtype"] = 99;
  expect_says(with(weight), "its element type has the code 99");
  weight["tensor_meta"]["dtype"] = 7;
  weight["tensor_meta"]["layout"] = 1;
  expect_says(with(weight), "not strided");
  weight["tensor_meta"].erase("sizes");
  expect_says(with(weight), "weight 'w': its tensor_meta has no 'sizes'");
  weight["tensor_meta"] = nullptr;
  expect_says(with(weight), "weight 'w': its tensor_meta has no 'dtype'");
  expect_says(with(17), "weight 'w': its entry is no object");
  expect_says(refusal_with([](Members& m) { m["data/weights/model_weights_config.json"] = config(Json::object()); }),
              "the program's parameter 'w' is not in the archive");
  expect_says(refusal_with([](Members& m) {
                m["data/constants/model_constants_config.json"] =
                    R"({"config": {"o": {"path_name": "custom_obj_0", "is_param": false, "use_pickle": true,
                        "tensor_meta": null}}})";
              }),
              "constant 'o': a custom object");
}

TEST(ReadArchive, TiedWeightsShareOneStorage) {
  Members members = small_members();
  members["data/weights/model_weights_config.json"] =
      config({{"w", small_weight({2, 3}, {3, 1})}, {"tied", small_weight({3}, {1}, 3)}});
  const TemporaryFolder folder;
  const Archive archive = read_archive(folder.file("m.pt2", testing::zip(members)));
  EXPECT_EQ(archive.weights.at("w").storage, archive.weights.at("tied").storage);
  EXPECT_TRUE(at::equal(weight_tensor(archive.weights.at("tied")), at::arange(4, 7, at::kFloat)));
}

TEST(ReadArchive, CompressedMembersAreRefused) {
  std::string bytes = testing::zip(small_members());
  const auto entry = bytes.find("PK\x01\x02");
  ASSERT_NE(entry, std::string::npos);
  bytes[entry + 10] = 8;  // deflate
  expect_says(refusal(bytes), "is compressed");
}

TEST(ReadArchive, MisalignedMembersAreCopied) {
  // Three more bytes in front shift every member; offsets in the directory are relative to the file's start.
  Members members = small_members();
  const TemporaryFolder folder;
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, std::size_t size) {
        bytes.append(static_cast<const char*>(data), size);
        return size;
      },
      true, 1);
  for (const auto& [name, contents] : members) writer.writeRecord(name, contents.data(), contents.size());
  writer.writeEndOfFile();
  const Archive archive = read_archive(folder.file("m.pt2", bytes));
  const at::Tensor w = weight_tensor(archive.weights.at("w"));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(w.const_data_ptr()) % 16, 0);
  EXPECT_TRUE(at::equal(w, at::arange(1, 7, at::kFloat).view({2, 3})));
}

TEST(CheckArchive, NamesMembersThatDiffer) {
  const TemporaryFolder folder;
  std::string bytes = testing::zip(small_members());
  std::size_t calls = 0;
  EXPECT_TRUE(check_archive(folder.file("a.pt2", bytes), [&](std::size_t done, std::size_t all) {
                EXPECT_EQ(done, ++calls);
                EXPECT_EQ(all, 10);
              }).empty());
  EXPECT_EQ(calls, 10);
  const float w[2] = {1, 2};
  const auto at = bytes.find(std::string(reinterpret_cast<const char*>(w), sizeof(w)));
  ASSERT_NE(at, std::string::npos);
  bytes[at + 3] ^= 1;
  const auto path = folder.file("b.pt2", bytes);
  EXPECT_EQ(check_archive(path), std::vector<std::string>{"data/weights/weight_0"});
  EXPECT_NO_THROW(read_archive(path));  // reading does not look at every byte
}

TEST(Crc32, KnownValues) {
  const auto of = [](std::string_view text) {
    return crc32({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  };
  EXPECT_EQ(of(""), 0U);
  EXPECT_EQ(of("123456789"), 0xcbf43926U);
  EXPECT_EQ(of("The quick brown fox jumps over the lazy dog"), 0x414fa339U);
}

TEST(WriteArchive, RoundTripKeepsSharingAndStrides) {
  const TemporaryFolder folder;
  Archive archive = read_archive(folder.file("m.pt2", testing::zip(small_members())));
  const at::Tensor base = at::arange(40, at::kFloat).view({4, 10});
  archive.weights["padded"] = make_weight(base.narrow(1, 1, 7), false, true);
  archive.weights["plain"] = make_weight(base.t(), false);
  Weight tied = archive.weights.at("w");
  tied.meta.sizes = {3};
  tied.meta.strides = {1};
  tied.meta.storage_offset = 3;
  archive.weights["tied"] = tied;
  archive.constants["empty"] = make_weight(at::empty({0, 5}, at::kBFloat16), false);
  archive.constants["scalar"] = make_weight(at::ones({}, at::kBool), false);
  archive.sample_inputs = {at::arange(12, at::kFloat).view({4, 3})};
  archive.extra_files["ikbo.json"] = "{\"a\": 1}";
  archive.extra_files["bytes"] = std::string("\0\xff", 2);
  const auto path = folder.path() / "out.ikbo.pt2";
  write_archive(archive, path);
  EXPECT_TRUE(check_archive(path).empty());
  const Archive back = read_archive(path);
  EXPECT_EQ(back.weights.size(), 4);
  EXPECT_EQ(back.weights.at("w").storage, back.weights.at("tied").storage);
  const at::Tensor padded = weight_tensor(back.weights.at("padded"));
  EXPECT_EQ(padded.strides(), (std::vector<std::int64_t>{10, 1}));
  EXPECT_EQ(back.weights.at("padded").storage->bytes.size(), 160);
  EXPECT_TRUE(at::equal(padded, base.narrow(1, 1, 7)));
  EXPECT_TRUE(at::equal(weight_tensor(back.weights.at("plain")), base.t()));
  EXPECT_EQ(weight_tensor(back.constants.at("empty")).sizes(), (std::vector<std::int64_t>{0, 5}));
  EXPECT_TRUE(weight_tensor(back.constants.at("scalar")).item<bool>());
  ASSERT_EQ(back.sample_inputs.size(), 1);
  EXPECT_TRUE(at::equal(back.sample_inputs[0], archive.sample_inputs[0]));
  EXPECT_EQ(back.extra_files, archive.extra_files);
  EXPECT_EQ(emit_program(back.program), emit_program(archive.program));
  EXPECT_EQ(ZipDirectory(MappedFile::open(path)->bytes(), "x").folder(), "out.ikbo");
}

TEST(WriteArchive, OverTheFileThatIsMapped) {
  const TemporaryFolder folder;
  const auto path = folder.file("m.pt2", testing::zip(small_members()));
  const Archive archive = read_archive(path);
  write_archive(archive, path);
  EXPECT_TRUE(at::equal(weight_tensor(archive.weights.at("w")), weight_tensor(read_archive(path).weights.at("w"))));
}

TEST(WriteArchive, FailuresLeaveNothingBehind) {
  const TemporaryFolder folder;
  const std::string bytes = testing::zip(small_members());
  Archive archive = read_archive(folder.file("m.pt2", bytes));
  const auto refused = [&](const std::filesystem::path& path) -> std::string {
    try {
      write_archive(archive, path);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  expect_says(refused(folder.path()), "is a folder");
  expect_says(refused(folder.path() / "none" / "a.pt2"), "none does not exist");
  expect_says(refused(folder.path() / ".pt2"), "begins with a dot");
  expect_says(refused("/proc/a.pt2"), "cannot be written");

  archive.sample_inputs = {at::ones({1}), at::ones({2})};
  expect_says(refused(folder.path() / "m.pt2"), "2 sample inputs for a program with 1 tensor inputs");
  archive.sample_inputs.clear();

  // A disk that is full, as far as a limit on the file's size can stand for one.
  archive.weights["large"] = make_weight(at::ones({1 << 20}), false);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const TemporaryFolder other;  // the same name, since it stands in front of every member
  write_archive(archive, other.path() / "m.pt2");
  const rlim_t whole = std::filesystem::file_size(other.path() / "m.pt2");
  for (const rlim_t limit :
       {rlim_t{0}, rlim_t{100}, rlim_t{100000}, whole - 5000, whole - 500, whole - 100, whole - 1}) {
    const rlimit small{limit, old.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::string message = refused(folder.path() / "m.pt2");
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
    EXPECT_NE(message.find("m.pt2: cannot be written: "), std::string::npos) << limit << ": " << message;
    expect_says(message, "File too large");
  }
  archive.weights.erase("w");
  expect_says(refused(folder.path() / "m.pt2"), "the program's weight 'w' has no contents");

  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) files.push_back(entry.path().filename());
  EXPECT_EQ(files, std::vector<std::string>{"m.pt2"});
  std::ifstream in(folder.path() / "m.pt2", std::ios::binary);
  EXPECT_TRUE(std::string(std::istreambuf_iterator<char>(in), {}) == bytes);
}

TEST(Weights, TypesRoundTrip) {
  for (const auto type : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble,
                          at::kBool, at::kBFloat16, at::kComplexFloat, at::kUInt16, at::kFloat8_e5m2}) {
    EXPECT_EQ(scalar_type(dtype_of(type)), type);
    EXPECT_EQ(dtype_bytes(dtype_of(type)), static_cast<std::int64_t>(c10::elementSize(type)));
  }
  EXPECT_THROW(scalar_type(static_cast<DType>(99)), Error);
  EXPECT_THROW(dtype_of(at::kQInt8), Error);
}

}  // namespace
}  // namespace ikbo::graph
