#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graph/program.h"

namespace ikbo::graph {

/// Bytes that belong to somebody: a mapped file or an owned buffer. Tied weights share one Storage.
struct Storage {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

/// A parameter, buffer or constant. `meta` has integer sizes, strides and offset; several may share a storage.
struct Weight {
  TensorMeta meta;
  bool is_parameter = true;
  std::shared_ptr<const Storage> storage;
};

/// An archive as torch.export.save writes it (PyTorch 2.11), in memory. Weights stay in the mapped file until they are
/// touched; writing streams them from there.
struct Archive {
  Program program;
  std::map<std::string, Weight> weights;    // by state-dict name
  std::map<std::string, Weight> constants;  // lifted tensor constants and non-persistent buffers
  /// Sample inputs as (args..., kwargs) flattened in the graph's order; empty where the archive has none or they are
  /// not plain tensors.
  std::vector<at::Tensor> sample_inputs;
  std::map<std::string, std::string> extra_files;  // "ikbo.json" -> contents; torch.export's extra_files
  std::filesystem::path path;                      // where it was read from; empty when made in memory
};

/// Reads an archive. Never trusts it: every offset, size, name and type is checked, and what is wrong is named in an
/// ikbo::Error ("model.pt2: not an archive of torch.export.save: ...").
Archive read_archive(const std::filesystem::path& path);

/// Writes what torch.export.load reads, through a temporary file beside `path` that replaces it at the end.
void write_archive(const Archive& archive, const std::filesystem::path& path);

/// Compares the checksum of every member; `progress` is told members done and all. Returns the names that differ.
std::vector<std::string> check_archive(const std::filesystem::path& path,
                                       const std::function<void(std::size_t, std::size_t)>& progress = {});

/// A tensor on the CPU that views the weight's storage (read-only by contract).
at::Tensor weight_tensor(const Weight& weight);
/// A weight that owns a contiguous copy of `tensor`, or its strided storage where `keep_strides`.
Weight make_weight(const at::Tensor& tensor, bool is_parameter, bool keep_strides = false);

at::ScalarType scalar_type(DType dtype);  // throws ikbo::Error for a code that is not known
DType dtype_of(at::ScalarType type);

}  // namespace ikbo::graph
