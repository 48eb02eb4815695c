// Stands in for the CUDA runtime: its functions that nvcc's code and csrc call. Kernels run when they are launched.
#include <map>
#include <set>
#include <stdexcept>

#include "machine.h"

namespace {

using ptx::report;

// Values of cudaError_t.
enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidConfiguration = 9,
  kInvalidFunction = 98,
  kInvalidDevice = 101,
  kLaunchFailure = 719
};
// The limits of a launch that asks for no more.
constexpr size_t kSharedBytes = 48 * 1024, kParameterBytes = 4096;
constexpr unsigned kMaxThreads = 1024;

struct Dim3 {
  unsigned x, y, z;
};
struct Configuration {
  Dim3 grid, block;
  size_t shared;
  void* stream;
};

Configuration pushed;
int last_error = kSuccess;
std::string why;

// Kernels that prefer as much shared memory as a multiprocessor has.
std::set<const void*>& preferring() {
  static std::set<const void*> made;
  return made;
}

// Names of kernels by the address of the host's function.
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> made;
  return made;
}

int fail(int error, const std::string& text) {
  why = text;
  return last_error = error;
}

bool is_possible(const ptx::Function& f, const Dim3& grid, const Dim3& block) {
  if (grid.x == 0 || grid.x > 0x7fffffff || block.x == 0 || block.x > kMaxThreads) return false;
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) return false;  // the interpreter has no others
  return f.threads == 0 || block.x <= static_cast<unsigned>(f.threads);
}

int launch(const std::string& name, const Dim3& grid, const Dim3& block, void** arguments, size_t shared) {
  try {
    ptx::Function* const f = ptx::find_kernel(name);
    if (!f) return fail(kInvalidFunction, "no kernel " + name);
    if (!is_possible(*f, grid, block))
      return fail(kInvalidConfiguration,
                  name + " with a grid of " + std::to_string(grid.x) + " thread blocks of " + std::to_string(block.x));
    const size_t all = shared + static_cast<size_t>(f->uses_dynamic_shared ? f->dynamic_offset() : f->static_shared);
    if (all > kSharedBytes)
      return fail(kInvalidValue, name + " with " + std::to_string(all) + " bytes of shared memory");
    std::vector<ptx::u8> parameters;
    for (size_t k = 0; k < f->parameters.size(); ++k) {
      const auto offset = static_cast<size_t>(f->parameters[k].offset),
                 bytes = static_cast<size_t>(f->parameters[k].bytes);
      parameters.resize(offset + bytes);
      std::memcpy(parameters.data() + offset, arguments[k], bytes);
    }
    if (parameters.size() > kParameterBytes) return fail(kInvalidValue, name + " with more than 4 KiB of parameters");
    ptx::launch(*f, grid.x, block.x, static_cast<ptx::u32>(shared), parameters);
    return kSuccess;
  } catch (const std::runtime_error& error) {
    return fail(kLaunchFailure, error.what());
  }
}

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* count) { return *count = 1, kSuccess; }
int cudaGetDevice(int* device) { return *device = 0, kSuccess; }
int cudaSetDevice(int device) {
  return device == 0 ? kSuccess : fail(kInvalidDevice, "no device " + std::to_string(device));
}
int cudaGetLastError() {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}
const char* cudaGetErrorString(int) { return why.c_str(); }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
  return std::memcpy(to, from, bytes), kSuccess;
}
int cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  constexpr int kPreferredCarveout = 9;
  if (attribute != kPreferredCarveout || value != 100 || !kernels().count(kernel))
    return fail(kInvalidValue, "an attribute of a kernel");
  return preferring().insert(kernel), kSuccess;
}
int cudaHostRegister(void*, size_t, unsigned) { return kSuccess; }
int cudaHostUnregister(void*) { return kSuccess; }

// Called by nvcc's code: registration, <<<...>>>, and the launch of toolkits before and since CUDA 13.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels()[host] = name;
}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return kSuccess;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return kSuccess;
}
int cudaLaunchKernel(const void* host, Dim3 grid, Dim3 block, void** arguments, size_t shared, void*) {
  if (shared > 0 && !preferring().count(host))
    report("dynamic shared memory without a preference for it", kernels()[host]);
  return launch(kernels()[host], grid, block, arguments, shared);
}
int __cudaGetKernel(void** kernel, const void* host) { return *kernel = const_cast<void*>(host), kSuccess; }
int __cudaLaunchKernel(void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

}  // extern "C"
