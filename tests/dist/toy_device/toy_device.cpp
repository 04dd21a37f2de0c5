// A device that is not CUDA: its memory is the host's, its work is done by the CPU's kernels when it is called.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

#include <chrono>

namespace {

constexpr auto TOY = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[COUNT] = {0, 0};
std::atomic<c10::StreamId> next_stream{1};
std::atomic<int64_t> allocated{0}, peak{0};

struct ToyAllocator final : c10::Allocator {
  static void release(void* memory) { c10::free_cpu(memory); }
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? c10::alloc_cpu(size) : nullptr;
    peak = std::max<int64_t>(peak, allocated += static_cast<int64_t>(size));
    return {memory, memory, &release, c10::Device(TOY, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
ToyAllocator allocator;
REGISTER_ALLOCATOR(TOY, &allocator);

struct ToyGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TOY; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current;
    current = device.index();
    return {TOY, before};
  }
  c10::Device getDevice() const override { return {TOY, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {  // torch 2.6 wants noexcept, newer ones do not
    return c10::Stream(c10::Stream::UNSAFE, device, streams[std::max<int>(device.index(), 0)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::UNSAFE, device, next_stream++); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = getStream(stream.device());
    streams[std::max<int>(stream.device().index(), 0)] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new double;
    *static_cast<double*>(*event) =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return *static_cast<double*>(to) - *static_cast<double*>(from);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, ToyGuard);

struct ToyGenerator final : at::CPUGeneratorImpl {
  ToyGenerator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(TOY, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator generators[COUNT] = {at::make_generator<ToyGenerator>(0), at::make_generator<ToyGenerator>(1)};

struct ToyHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // torch 2.6 has no such hooks
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generators[std::max<int>(index, 0)]; }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<ToyGenerator>(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(TOY, device && device->has_index() ? device->index() : current));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(TOY, device && device->has_index() ? device->index() : current));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (self.numel()) on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto needed = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    auto memory = allocator.allocate(needed);
    if (storage->nbytes()) std::memcpy(memory.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("record_stream", &record_stream);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static ToyHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("peak", [] { return peak.load(); });
  m.def("generator", [](int index) { return generators[index]; });
}
