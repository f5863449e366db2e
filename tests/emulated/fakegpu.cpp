// An emulated accelerator: the PrivateUse1 device "fakegpu", whose memory is the host's, and a c10d backend that hands
// every call to a Python object (strict.py). It computes nothing itself: views are made here, and all other operators
// run on the CPU. What a CUDA device would leave undefined is filled with a pattern, so that a test can see it.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>

using at::Tensor;
using Tensors = std::vector<Tensor>;
constexpr auto FAKEGPU = c10::DeviceType::PrivateUse1;
constexpr int NEW_MEMORY = 0xCD, FREED_MEMORY = 0xDD, NOT_ARRIVED = 0xEE;

// --- Devices: as with CUDA, every thread begins on device 0. There is one stream, always up to date. ---

static thread_local c10::DeviceIndex current_device = 0;
static c10::DeviceIndex device_count = 1;

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return FAKEGPU; }
  c10::Device getDevice() const override { return {FAKEGPU, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

// --- Memory: counted and limited per process ---

struct Counters {
  int64_t allocated = 0, peak = 0, pinned = 0, pinned_peak = 0;
  int64_t to_device = 0, to_device_bytes = 0, to_host = 0, to_host_bytes = 0, late = 0;
};
static Counters counters;
static int64_t memory_limit = -1;
// The device that this process has set, where it has: no thread of it has business on another one.
static int home_device = -1;
static std::vector<std::string> violations;
static std::mutex memory_lock;
static std::map<void*, size_t> device_blocks, pinned_blocks;

static void free_device(void* data) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto block = device_blocks.find(data);
  counters.allocated -= block->second;
  memset(data, FREED_MEMORY, block->second);
  device_blocks.erase(block);
  std::free(data);
}

static void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto block = pinned_blocks.find(data);
  counters.pinned -= block->second;
  pinned_blocks.erase(block);
  std::free(data);
}

static void* new_block(std::map<void*, size_t>& blocks, size_t size, int64_t& now, int64_t& peak) {
  void* data = std::aligned_alloc(512, size);
  memset(data, NEW_MEMORY, size);
  blocks[data] = size;
  now += size;
  peak = std::max(peak, now);
  return data;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(FAKEGPU, current_device);
    if (!bytes) return {nullptr, nullptr, &free_device, device};
    std::lock_guard<std::mutex> guard(memory_lock);
    if (home_device >= 0 && current_device != home_device)
      violations.push_back(
          "memory on device " + std::to_string(current_device) + ", where this process has set device " +
          std::to_string(home_device));
    auto size = (bytes + 511) / 512 * 512;
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory_limit < 0 || counters.allocated + (int64_t)size <= memory_limit,
        "CUDA out of memory (emulated): tried to allocate ", size, " bytes");
    auto data = new_block(device_blocks, size, counters.allocated, counters.peak);
    return {data, data, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(FAKEGPU, &device_allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_pinned, c10::Device(at::kCPU)};
    std::lock_guard<std::mutex> guard(memory_lock);
    size_t size = 512;
    while (size < bytes) size *= 2;  // as torch's caching allocator for the host
    auto data = new_block(pinned_blocks, size, counters.pinned, counters.pinned_peak);
    return {data, data, &free_pinned, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;

static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto block = pinned_blocks.upper_bound(const_cast<void*>(data));
  if (block == pinned_blocks.begin()) return false;
  --block;
  return (char*)data < (char*)block->first + block->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // this and the next override from torch 2.7 on
  bool isAvailable() const { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return {FAKEGPU, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto resized = storage.unsafeGetStorageImpl();
    auto data = device_allocator.allocate(bytes);
    if (resized->nbytes() && bytes) memcpy(data.get(), resized->data(), std::min(bytes, resized->nbytes()));
    resized->set_data_ptr_noswap(std::move(data));
    resized->set_nbytes(bytes);
  }
};

// --- Copies: those with non_blocking between pinned memory and the device end in synchronize() ---

struct LateCopy {
  Tensor host, data;  // `data`: what `host` gets, where the copy is to the host
  uint32_t checksum;  // of `host`, where the copy is to the device
};
static std::vector<LateCopy> late_copies;
static std::mutex copies_lock;

static Tensor host_alias(const Tensor& tensor) {
  if (tensor.device().type() != FAKEGPU) return tensor;
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  auto alias = tensor.numel() ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
                              : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

static uint32_t checksum_of(const Tensor& tensor) {
  auto flat = tensor.resolve_conj().contiguous();
  auto data = (const unsigned char*)flat.data_ptr();
  uint32_t hash = 2166136261u;  // FNV-1a
  for (size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ data[i]) * 16777619u;
  return hash;
}

static void poison(const Tensor& tensor) {
  auto host = host_alias(tensor);
  auto pattern = at::empty(host.sizes(), host.options());
  if (pattern.numel()) memset(pattern.data_ptr(), NOT_ARRIVED, pattern.nbytes());
  host.copy_(pattern);
}

static void synchronize() {
  std::lock_guard<std::mutex> guard(copies_lock);
  std::vector<LateCopy> ended;
  ended.swap(late_copies);
  for (auto& copy : ended) {
    if (copy.data.defined())
      copy.host.copy_(copy.data);
    else if (checksum_of(copy.host) != copy.checksum)
      violations.push_back("pinned memory was changed before its non_blocking copy to the device had ended");
  }
}

static void copy_late(const Tensor& from, const Tensor& to, bool is_to_host) {
  std::lock_guard<std::mutex> guard(copies_lock);
  counters.late++;
  if (is_to_host) {
    late_copies.push_back({to, from.expand_as(to).clone(), 0});
    poison(to);
  } else {
    to.copy_(from.expand_as(to));
    late_copies.push_back({from, {}, checksum_of(from)});
  }
}

static Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  auto from = host_alias(self), to = host_alias(target);
  bool is_to_host = target.is_cpu(), is_within_device = is_to_host == self.is_cpu();
  if (!is_within_device) {
    (is_to_host ? counters.to_host : counters.to_device)++;
    (is_to_host ? counters.to_host_bytes : counters.to_device_bytes) += target.nbytes();
    auto host = is_to_host ? to : from;
    if (non_blocking && host.numel() && is_pinned(host.data_ptr())) {
      copy_late(from, to, is_to_host);
      return target;
    }
    synchronize();
  }
  to.copy_(from.expand_as(to));
  return target;
}

// --- Operators ---

using ScalarType = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
using Sizes = c10::IntArrayRef;
static const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

static Device with_index(Device device) { return device && device->has_index() ? device : std::nullopt; }

static Tensor empty(Sizes sizes, ScalarType dtype, Layout, Device device, Flag, Format format) {
  c10::OptionalDeviceGuard guard(with_index(device));
  return at::detail::empty_generic(sizes, &device_allocator, KEYS, c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype, Layout, Device device, Flag) {
  c10::OptionalDeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, KEYS, c10::dtype_or_default(dtype));
}

static Tensor as_strided(const Tensor& self, Sizes sizes, Sizes strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

static Tensor view(const Tensor& self, Sizes sizes) { return at::native::view(self, sizes); }

static Tensor reshape_alias(const Tensor& self, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

static Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

static const Tensor& resize(const Tensor& self, Sizes sizes, Format) {
  if (self.sizes() == sizes) return self;  // a strided tensor stays one
  auto resized = self.unsafeGetTensorImpl();
  resized->set_sizes_contiguous(sizes);
  size_t bytes = (resized->numel() + resized->storage_offset()) * self.element_size();
  if (self.storage().nbytes() < bytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

static Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, Sizes sizes, Sizes strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto changed = self.unsafeGetTensorImpl();
  changed->set_storage_offset(offset);
  if (strides.data())
    changed->set_sizes_and_strides(sizes, strides);
  else
    changed->set_sizes_contiguous(sizes);
  return self;
}

static Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t elements = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, source, 0, {elements}, {});
}

static at::Scalar local_scalar(const Tensor& self) {
  synchronize();
  counters.to_host++;
  return host_alias(self).item();
}

static Tensor copy_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

static void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
}

// --- The process group's backend: a Python object has the rules, and gives each call an object to wait for ---

struct PythonWork final : c10d::Work {
  PyObject* operation;
  Tensors outputs;  // of a future: DistributedDataParallel asks for those of its all-reduces
  PythonWork(py::object made, Tensors outputs)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), operation(made.release().ptr()), outputs(std::move(outputs)) {}
  ~PythonWork() override {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(operation);
  }
  py::object ask(const char* name) { return py::reinterpret_borrow<py::object>(operation).attr(name)(); }
  bool wait(std::chrono::milliseconds) override {
    py::gil_scoped_acquire gil;
    ask("wait");
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return ask("is_completed").cast<bool>();
  }
  bool isSuccess() const override { return true; }
  // It has ended: as everywhere here, to wait is to block the host.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(!outputs.empty(), "strict: a future of this operation");
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{outputs[0].device()});
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

static int number_of(const c10d::ReduceOp& operation) { return (int)(c10d::ReduceOp::RedOpType)operation; }
static Tensors first_of(const std::vector<Tensors>& lists) { return lists.empty() ? Tensors() : lists[0]; }

struct Backend final : c10d::Backend {
  py::object rules;
  Backend(int rank, int size, py::object rules) : c10d::Backend(rank, size), rules(std::move(rules)) {}
  ~Backend() override { rules.release(); }  // it may end after the interpreter
  const std::string getBackendName() const override { return "strict"; }
  bool supportsCoalescing() const { return true; }  // overrides from torch 2.7 on
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  template <class... Arguments>
  WorkPointer call(const char* name, Arguments&&... arguments) {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<PythonWork>(rules.attr(name)(std::forward<Arguments>(arguments)...), Tensors());
  }

  void startCoalescing() override {
    py::gil_scoped_acquire gil;
    rules.attr("start_coalescing")();
  }
  WorkPointer endCoalescing() override { return call("end_coalescing"); }
  WorkPointer send(Tensors& tensors, int peer, int) override { return call("send", tensors[0], peer); }
  WorkPointer recv(Tensors& tensors, int peer, int) override { return call("recv", tensors[0], peer); }
  WorkPointer barrier(const c10d::BarrierOptions&) override { return call("barrier"); }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return call("broadcast", tensors[0], options.rootRank);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    py::gil_scoped_acquire gil;
    auto operation = rules.attr("allreduce")(tensors[0], number_of(options.reduceOp));
    return c10::make_intrusive<PythonWork>(std::move(operation), tensors);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return call("allreduce_coalesced", tensors, number_of(options.reduceOp));
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return call("reduce", tensors[0], options.rootRank, number_of(options.reduceOp));
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return call("allgather", outputs[0], inputs[0]);
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return call("allgather_base", output, input);
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return call("allgather_base_coalesced", outputs, inputs);
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return call("reduce_scatter", outputs[0], inputs[0], number_of(options.reduceOp));
  }
  WorkPointer _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return call("reduce_scatter_base", output, input, number_of(options.reduceOp));
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return call("reduce_scatter_base_coalesced", outputs, inputs, number_of(options.reduceOp));
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return call("scatter", outputs[0], first_of(inputs), options.rootRank);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return call("gather", first_of(outputs), inputs[0], options.rootRank);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return call("alltoall", outputs, inputs);
  }
  WorkPointer alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions&) override {
    return call("alltoall_base", output, input, output_rows, input_rows);
  }
};

static std::map<std::string, int64_t> read_counters() {
  return {
      {"allocated", counters.allocated},
      {"peak", counters.peak},
      {"pinned", counters.pinned},
      {"pinned_peak", counters.pinned_peak},
      {"to_device", counters.to_device},
      {"to_device_bytes", counters.to_device_bytes},
      {"to_host", counters.to_host},
      {"to_host_bytes", counters.to_host_bytes},
      {"late", counters.late}};
}

static void reset_peaks() {
  auto allocated = counters.allocated, pinned = counters.pinned;
  counters = Counters();
  counters.allocated = counters.peak = allocated;
  counters.pinned = counters.pinned_peak = pinned;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def(py::init<int, int, py::object>());
  module.def("current_device", [] { return (int)current_device; });
  module.def("set_device", [](int index) { current_device = index; });
  module.def("device_count", [] { return (int)device_count; });
  module.def("set_device_count", [](int count) { device_count = count; });
  module.def("home_device", [] { return home_device; });
  module.def("set_home_device", [](int index) { home_device = index; });
  module.def("set_memory_limit", [](int64_t bytes) { memory_limit = bytes; });
  module.def("counters", &read_counters);
  module.def("reset_peaks", &reset_peaks);
  module.def("synchronize", &synchronize);
  module.def("host_alias", &host_alias);
  module.def("poison", &poison);
  module.def("checksum", [](const Tensor& tensor) { return checksum_of(host_alias(tensor)); });
  module.def("take_violations", [] { return std::exchange(violations, {}); });
}
