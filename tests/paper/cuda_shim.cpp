// A CUDA device for PyTorch's CPU build, as far as autograd's engine and fake tensors ask: it is
// there, has one stream and computes nothing. mock_gpu.py builds and loads this.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Hooks : at::CUDAHooksInterface {
  Hooks(const at::CUDAHooksArgs&) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Which kernel F.scaled_dot_product_attention takes on CUDA. In 16 bits, that is cuDNN's (3) on an
// H100 or B200, unless algorithms must be deterministic; then FlashAttention (1) without a mask; else
// memory-efficient attention (2). PyTorch's sdp_utils.cpp has all the rules.
static bool cudnn_first = false;
extern "C" void prefer_cudnn(int prefer) { cudnn_first = prefer; }
static int64_t choose(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                      const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                      bool) {
  bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  if (half && cudnn_first && !at::globalContext().deterministicAlgorithms()) return 3;
  return half && !mask ? 1 : 2;
}
static int chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose), 0);
