// Kernel launches and batches of copies at C's price: one call from Python, no header of CUDA, no link against it.
//
// The driver is found by dlopen, its records are declared here as far as a launch needs them: they are part of the
// driver's ABI, which CUDA 12.0 fixed. Nothing throws and nothing is kept between calls, so threads may launch at
// once.
#include "launch.hpp"

#include <dlfcn.h>

#include <atomic>

#ifndef CD_BUILD_ID
#define CD_BUILD_ID "unknown"
#endif

namespace {

// CUlaunchAttribute: an id, and a value in 64 bytes that start at offset 8.
struct Attribute {
  uint32_t id;
  uint32_t pad;
  union {
    int32_t number;
    unsigned char bytes[64];
  };
};
constexpr uint32_t kCooperative = 2;          // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr uint32_t kStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// CUlaunchConfig.
struct Config {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(Attribute) == 72 && offsetof(Attribute, number) == 8, "CUlaunchAttribute");
static_assert(offsetof(Config, stream) == 32 && sizeof(Config) == 56, "CUlaunchConfig");

using LaunchFn = int (*)(const Config*, void* function, void** arguments, void** extra);
using TextFn = int (*)(int status, const char** text);
using CapturingFn = int (*)(void* stream, int* status);

LaunchFn launch_kernel = nullptr;
CapturingFn is_capturing = nullptr;
TextFn error_name = nullptr, error_text = nullptr;

using ContextFn = int (*)(void** context);
using QueryFn = int (*)(void* stream);
using CopyFn = int (*)(uint64_t to, uint64_t from, size_t num_bytes, void* stream);
using WordFn = int (*)(void* stream, uint64_t address, uint64_t value, unsigned flags);
constexpr unsigned kGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ; as a write: CU_STREAM_WRITE_VALUE_DEFAULT
constexpr int kNotSupported = 801;       // CUDA_ERROR_NOT_SUPPORTED
constexpr int kNotReady = 600;           // CUDA_ERROR_NOT_READY

ContextFn get_context = nullptr;
QueryFn query_stream = nullptr;
CopyFn copy_async = nullptr;
WordFn wait_value = nullptr, write_value = nullptr;

enum StepKind : uint64_t { kCopy = 0, kWait = 1, kWrite = 2 };

}  // namespace

CD_API const char* cd_build_id() { return CD_BUILD_ID; }

// For memory that hosts share and Python reads and writes: what stands before it is done before what stands behind.
CD_API void cd_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Find the driver in this shared object. Null, or what is wrong. Safe to call again.
CD_API const char* cd_open(const char* driver) {
  void* library = dlopen(driver, RTLD_NOW);
  if (!library) return dlerror();
  auto launch = reinterpret_cast<LaunchFn>(dlsym(library, "cuLaunchKernelEx"));
  auto name = reinterpret_cast<TextFn>(dlsym(library, "cuGetErrorName"));
  auto text = reinterpret_cast<TextFn>(dlsym(library, "cuGetErrorString"));
  if (!launch || !name || !text) return "it has no cuLaunchKernelEx, so the driver is older than CUDA 12.0";
  launch_kernel = launch;
  is_capturing = reinterpret_cast<CapturingFn>(dlsym(library, "cuStreamIsCapturing"));
  get_context = reinterpret_cast<ContextFn>(dlsym(library, "cuCtxGetCurrent"));
  query_stream = reinterpret_cast<QueryFn>(dlsym(library, "cuStreamQuery"));
  copy_async = reinterpret_cast<CopyFn>(dlsym(library, "cuMemcpyAsync"));
  wait_value = reinterpret_cast<WordFn>(dlsym(library, "cuStreamWaitValue64_v2"));
  write_value = reinterpret_cast<WordFn>(dlsym(library, "cuStreamWriteValue64_v2"));
  error_name = name;
  error_text = text;
  return nullptr;
}

// What a status means: its name or its description; "" where the driver does not know it.
CD_API const char* cd_error(int status, int described) {
  const char* text = nullptr;
  (described ? error_text : error_name)(status, &text);
  return text ? text : "";
}

// The driver's status. `arguments`: addresses of the parameters.
CD_API int cd_launch(const Prepared* p, void* stream, void** arguments) {
  Attribute attributes[2];
  uint32_t count = 0;
  if (p->flags & kIsCooperative) attributes[count++] = {kCooperative, 0, {1}};
  if (p->flags & kIsOverlapped) attributes[count++] = {kStreamSerialization, 0, {1}};
  const Config config = {{p->blocks, 1, 1}, {p->threads, 1, 1}, p->shared_bytes, stream, attributes, count};
  return launch_kernel(&config, p->function, arguments, nullptr);
}

CD_API int cd_launch_one(const Prepared* p, void* stream, void* argument) {
  const int status = cd_launch(p, stream, &argument);
  return status ? status : cd::is_captured(stream) ? kCaptured : 0;
}

bool cd::is_captured(void* stream) {
  int capturing = 0;
  return is_capturing && !is_capturing(stream, &capturing) && capturing;
}

void* cd::current_context() {
  void* context = nullptr;
  if (get_context) get_context(&context);
  return context;
}

int cd::copy(uint64_t to, uint64_t from, size_t num_bytes, void* stream) {
  return copy_async ? copy_async(to, from, num_bytes, stream) : kNotSupported;
}

bool cd::is_busy(void* stream) { return query_stream && query_stream(stream) == kNotReady; }

// One thing that a stream does. kCopy: `amount` bytes from `from` to `to`. kWait: until the 8 bytes at `to` are
// `amount` or more, modulo 2^64. kWrite: `amount` into the 8 bytes at `to`, after all that came before.
struct Step {
  uint64_t kind, to, from, amount;
};
static_assert(sizeof(Step) == 32, "Step: Python and C++ differ");

// Copies, waits and writes of a stream, in order. The driver's status; on an error those behind it are left out.
CD_API int cd_copies(const Step* steps, int count, void* stream) {
  if (!copy_async || !wait_value || !write_value) return kNotSupported;
  for (const Step* step = steps; step < steps + count; ++step) {
    const int status = step->kind == kCopy   ? copy_async(step->to, step->from, step->amount, stream)
                       : step->kind == kWait ? wait_value(stream, step->to, step->amount, kGreaterOrEqual)
                                             : write_value(stream, step->to, step->amount, kGreaterOrEqual);
    if (status) return status;
  }
  return 0;
}
