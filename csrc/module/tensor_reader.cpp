#include "tensor_reader.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace halfstep {
namespace {

#if defined(__APPLE__)
constexpr const char* kSuffix = ".dylib";
#else
constexpr const char* kSuffix = ".so";
#endif

// A library that is loaded already, and is never loaded by this.
class Loaded {
 public:
  explicit Loaded(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
    if (!handle_) throw std::runtime_error(HALFSTEP_MODULE ": " + path + " is not loaded");
  }
  ~Loaded() { dlclose(handle_); }
  Loaded(const Loaded&) = delete;

  template <class Function>
  void find(const char* name, Function& function) const {
    void* symbol = dlsym(handle_, name);
    if (!symbol) throw std::runtime_error(HALFSTEP_MODULE ": this torch has no " + std::string(name));
    memcpy(&function, &symbol, sizeof(function));
  }

  int32_t constant(const char* name) const {
    int32_t (*get)();
    find(name, get);
    return get();
  }

 private:
  void* handle_;
};

// Where in the object the word lies that points to the implementation: an at::Tensor is that one pointer.
Py_ssize_t offset_of(PyObject* tensor, uint64_t implementation) {
  const Py_ssize_t size = Py_TYPE(tensor)->tp_basicsize, word = sizeof(void*);
  for (Py_ssize_t at = sizeof(PyObject); at + word <= size; at += word) {
    uintptr_t value;
    memcpy(&value, reinterpret_cast<const char*>(tensor) + at, sizeof(value));
    if (value == implementation) return at;
  }
  throw std::runtime_error(HALFSTEP_MODULE ": a tensor object of this torch does not hold its at::Tensor");
}

}  // namespace

TensorReader::TensorReader(const std::string& folder, const std::string& device_type, PyObject* tensor_type,
                           PyObject* parameter_type, PyObject* probe, uint64_t implementation)
    : tensor_type_(tensor_type), parameter_type_(parameter_type), offset_(offset_of(probe, implementation)) {
  const Loaded torch(folder + "/libtorch_cpu" + kSuffix), c10(folder + "/libc10" + kSuffix);
  device_type_ = torch.constant(("aoti_torch_device_type_" + device_type).c_str());
  strided_ = torch.constant("aoti_torch_layout_strided");
  dtypes_[static_cast<int>(Dtype::f32)] = torch.constant("aoti_torch_dtype_float32");
  dtypes_[static_cast<int>(Dtype::bf16)] = torch.constant("aoti_torch_dtype_bfloat16");
  dtypes_[static_cast<int>(Dtype::f16)] = torch.constant("aoti_torch_dtype_float16");
  c10.find("_ZNK3c1010TensorImpl4gradEv", grad_of_);
  torch.find("_ZN2at6native6is_negERKNS_6TensorE", is_negated_);
  torch.find("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", bump_version_);
  torch.find("aoti_torch_is_defined", is_defined_);
  torch.find("aoti_torch_assign_tensors", assign_);
  torch.find("aoti_torch_get_device_type", device_type_of_);
  torch.find("aoti_torch_get_device_index", device_index_of_);
  torch.find("aoti_torch_get_layout", layout_of_);
  torch.find("aoti_torch_get_dtype", dtype_of_);
  torch.find("aoti_torch_get_dim", dims_of_);
  torch.find("aoti_torch_get_sizes", sizes_of_);
  torch.find("aoti_torch_is_contiguous", is_contiguous_);
  torch.find("aoti_torch_get_data_ptr", data_of_);
  int32_t (*new_nothing)(Handle*);
  torch.find("aoti_torch_new_uninitialized_tensor", new_nothing);
  if (new_nothing(&nothing_)) throw std::runtime_error(HALFSTEP_MODULE ": this torch makes no undefined tensor");
}

// To be asked first: the other questions complain aloud about tensors that have no memory. A negated one (z.conj().imag) holds
// its numbers with the other sign until they are read.
bool TensorReader::is_plain(Handle tensor) const {
  int32_t device, layout;
  return !device_type_of_(tensor, &device) && device == device_type_ && !layout_of_(tensor, &layout) &&
         layout == strided_ && !is_negated_(tensor);
}

bool TensorReader::has_sizes(Handle tensor, const TensorFacts& facts) const {
  bool contiguous;
  int64_t dims, *sizes;
  return !dims_of_(tensor, &dims) && dims == facts.dims && !sizes_of_(tensor, &sizes) &&
         std::equal(sizes, sizes + dims, facts.sizes) && !is_contiguous_(tensor, &contiguous) && contiguous;
}

bool TensorReader::read(Handle tensor, TensorFacts& facts) const {
  int64_t dims, *sizes;
  void* data;
  if (!is_plain(tensor) || dims_of_(tensor, &dims) || dims > TensorFacts::kDims || sizes_of_(tensor, &sizes) ||
      dtype_of_(tensor, &facts.dtype) || data_of_(tensor, &data))
    return false;
  facts.data = data;
  facts.dims = static_cast<int32_t>(dims);
  facts.numel = 1;
  for (int64_t i = 0; i < dims; ++i) facts.numel *= facts.sizes[i] = sizes[i];
  bool contiguous;
  return !is_contiguous_(tensor, &contiguous) && contiguous && (data || facts.numel == 0);
}

bool TensorReader::still(Handle tensor, const TensorFacts& facts) const {
  int32_t dtype;
  void* data;  // the same address and sizes: then it is where it was
  return has_sizes(tensor, facts) && !dtype_of_(tensor, &dtype) && dtype == facts.dtype && !is_negated_(tensor) &&
         !data_of_(tensor, &data) && data == facts.data;
}

bool TensorReader::is_like(Handle tensor, const TensorFacts& like, const void*& data, Dtype& dtype) const {
  int32_t torchs;
  void* found;
  if (!is_plain(tensor) || !has_sizes(tensor, like) || dtype_of_(tensor, &torchs) || data_of_(tensor, &found) ||
      (!found && like.numel > 0))
    return false;
  data = found;
  return knows(torchs, dtype);
}

bool TensorReader::knows(int32_t torchs, Dtype& dtype) const {
  const int32_t* known = std::find(dtypes_, dtypes_ + kDtypes, torchs);
  dtype = static_cast<Dtype>(known - dtypes_);
  return known != dtypes_ + kDtypes;
}

}  // namespace halfstep
