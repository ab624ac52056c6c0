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

// CUstreamBatchMemOpParams: a wait or a write of 8 bytes.
struct WordOp {
  uint32_t kind, pad;
  uint64_t address, value;
  uint32_t flags, pad2;
  uint64_t alias, rest;
};
static_assert(sizeof(WordOp) == 48 && offsetof(WordOp, value) == 16, "CUstreamBatchMemOpParams");
constexpr uint32_t kWaitOp = 4, kWriteOp = 5;  // CU_STREAM_MEM_OP_WAIT_VALUE_64, ..._WRITE_VALUE_64

using WordsFn = int (*)(void* stream, unsigned count, WordOp* ops, unsigned flags);
using EventFn = int (*)(void* event, void* stream);
using AwaitFn = int (*)(void* stream, void* event, unsigned flags);

ContextFn get_context = nullptr;
QueryFn query_stream = nullptr;
CopyFn copy_async = nullptr;
WordFn wait_value = nullptr, write_value = nullptr;
WordsFn word_ops = nullptr;
EventFn record_event = nullptr;
AwaitFn await_event = nullptr;

enum StepKind : uint64_t { kCopy = 0, kWait = 1, kWrite = 2, kMark = 3, kGraph = 4 };

constexpr int kAtOnce = 64;  // waits and writes of one call of the driver

// Graphs of copies.
using CreateStreamFn = int (*)(void** stream, unsigned flags);
using StreamFn = int (*)(void* stream);
using BeginFn = int (*)(void* stream, int mode);
using EndFn = int (*)(void* stream, void** graph);
using InstantiateFn = int (*)(void** exec, void* graph, unsigned long long flags);
using LaunchGraphFn = int (*)(void* exec, void* stream);
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED

CreateStreamFn create_stream = nullptr;
StreamFn destroy_stream = nullptr, destroy_graph = nullptr, destroy_exec = nullptr;
BeginFn begin_capture = nullptr;
EndFn end_capture = nullptr;
InstantiateFn instantiate = nullptr;
LaunchGraphFn launch_graph = nullptr;

template <class Fn>
void find(void* library, const char* name, Fn* function) {
  *function = reinterpret_cast<Fn>(dlsym(library, name));
}

}  // namespace

CD_API const char* cd_build_id() { return CD_BUILD_ID; }

// For memory that hosts share and Python reads and writes: what stands before it is done before what stands behind.
CD_API void cd_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Find the driver in this shared object. Null, or what is wrong. Safe to call again.
CD_API const char* cd_open(const char* driver) {
  void* library = dlopen(driver, RTLD_NOW);
  if (!library) return dlerror();
  // What every driver must have.
  auto launch = reinterpret_cast<LaunchFn>(dlsym(library, "cuLaunchKernelEx"));
  auto name = reinterpret_cast<TextFn>(dlsym(library, "cuGetErrorName"));
  auto text = reinterpret_cast<TextFn>(dlsym(library, "cuGetErrorString"));
  if (!launch || !name || !text) return "it has no cuLaunchKernelEx, so the driver is older than CUDA 12.0";
  launch_kernel = launch;
  // What older drivers may lack: its callers see null.
  find(library, "cuStreamIsCapturing", &is_capturing);
  find(library, "cuCtxGetCurrent", &get_context);
  find(library, "cuStreamQuery", &query_stream);
  find(library, "cuMemcpyAsync", &copy_async);
  find(library, "cuStreamWaitValue64_v2", &wait_value);
  find(library, "cuStreamWriteValue64_v2", &write_value);
  find(library, "cuStreamBatchMemOp_v2", &word_ops);
  find(library, "cuEventRecord", &record_event);
  find(library, "cuStreamWaitEvent", &await_event);
  find(library, "cuStreamCreate", &create_stream);
  find(library, "cuStreamDestroy_v2", &destroy_stream);
  find(library, "cuStreamBeginCapture_v2", &begin_capture);
  find(library, "cuStreamEndCapture", &end_capture);
  find(library, "cuGraphInstantiateWithFlags", &instantiate);
  find(library, "cuGraphLaunch", &launch_graph);
  find(library, "cuGraphDestroy", &destroy_graph);
  find(library, "cuGraphExecDestroy", &destroy_exec);
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

// One thing that a stream does, in this order. kCopy: `amount` bytes from `from` to `to`. kWait: until the 8 bytes at
// `to` are `amount` or more, modulo 2^64. kWrite: `amount` into the 8 bytes at `to`, after all that came before. kMark:
// the event `to`. kGraph: the executable graph `to`.
struct Step {
  uint64_t kind, to, from, amount;
};
static_assert(sizeof(Step) == 32, "Step: Python and C++ differ");

namespace {

// Waits and writes, one behind the other.
int run_words(const Step* step, int count, void* stream) {
  if (count == 1 || !word_ops) {
    int status = 0;
    for (const Step* end = step + count; step < end && !status; ++step)
      status = (step->kind == kWait ? wait_value : write_value)(stream, step->to, step->amount, kGreaterOrEqual);
    return status;
  }
  WordOp ops[kAtOnce];
  for (int i = 0; i < count; ++i)
    ops[i] = {step[i].kind == kWait ? kWaitOp : kWriteOp, 0, step[i].to, step[i].amount, kGreaterOrEqual, 0, 0, 0};
  return word_ops(stream, count, ops, 0);
}

int run_step(const Step& step, void* stream) {
  if (step.kind == kCopy) return copy_async(step.to, step.from, step.amount, stream);
  void* handle = reinterpret_cast<void*>(step.to);
  return step.kind == kMark ? record_event(handle, stream) : launch_graph(handle, stream);
}

bool is_word(const Step& step) { return step.kind == kWait || step.kind == kWrite; }

}  // namespace

// The driver's status; on an error those behind the refused ones are left out.
CD_API int cd_copies(const Step* steps, int count, void* stream) {
  if (!copy_async || !wait_value || !write_value || !record_event || !launch_graph) return kNotSupported;
  for (int i = 0, n = 0, status = 0; i < count; i += n) {
    for (n = 0; i + n < count && n < kAtOnce && is_word(steps[i + n]);) ++n;
    status = n ? run_words(steps + i, n, stream) : run_step(steps[i], stream);
    if (status) return status;
    n = n ? n : 1;
  }
  return 0;
}

// An executable graph of copies, one after the other: a launch of it costs the host less than one of them. The driver's
// status.
CD_API int cd_graph(const Step* steps, int count, void** exec) {
  if (!create_stream || !destroy_stream || !begin_capture || !end_capture || !instantiate || !destroy_graph)
    return kNotSupported;
  void *stream = nullptr, *graph = nullptr;
  int status = create_stream(&stream, kNonBlocking);
  if (status) return status;
  status = begin_capture(stream, kRelaxed);
  if (!status) {
    const int copied = cd_copies(steps, count, stream), ended = end_capture(stream, &graph);
    status = copied ? copied : ended;
  }
  if (!status) status = instantiate(exec, graph, 0);
  if (graph) destroy_graph(graph);
  destroy_stream(stream);
  return status;
}

// Nothing of it runs any more.
CD_API int cd_graph_free(void* exec) { return destroy_exec ? destroy_exec(exec) : kNotSupported; }

// A stream goes on when another has passed the event.
CD_API int cd_await(void* stream, void* event) { return await_event ? await_event(stream, event, 0) : kNotSupported; }

// The same as cd_copies, behind what the stream `behind` has now; `event` stands there.
CD_API int cd_copies_behind(const Step* steps, int count, void* stream, void* behind, void* event) {
  if (!record_event || !await_event) return kNotSupported;
  int status = record_event(event, behind);
  if (!status && behind != stream) status = await_event(stream, event, 0);
  return status ? status : cd_copies(steps, count, stream);
}

constexpr int kDisturbed = -2;

// A kernel of one argument, in whose record the addresses at `x` and `out` change.
struct KernelRepeat {
  const Quiet* quiet;
  const Prepared* prepared;
  void* argument;
  uint64_t *x, *out;
};

// The driver's status, kCaptured, or kDisturbed: nothing was launched.
CD_API int cd_repeat_kernel(const KernelRepeat* again, void* stream, uint64_t x, uint64_t out) {
  if (!cd::is_quiet(again->quiet)) return kDisturbed;
  *again->x = x;
  *again->out = out;
  return cd_launch_one(again->prepared, stream, again->argument);
}

// Copies of which the words at `numbers` are the operation's number, those at `marks` its events, and the one at
// `seen_at` the place that it has among `seen_slots`.
struct CopyRepeat {
  const Quiet* quiet;
  uint64_t* steps;
  const int64_t *numbers, *marks;
  int64_t count, num_numbers, num_marks, seen_at;
  uint64_t seen_first, seen_bytes, seen_slots;
  void* stream;
};

// As cd_copies_behind, or kDisturbed. `events`: the first stands behind what `behind` has now, the others are marks.
CD_API int cd_repeat_copies(const CopyRepeat* again, uint64_t seq, void* behind, const uint64_t* events) {
  if (!cd::is_quiet(again->quiet)) return kDisturbed;
  for (int64_t i = 0; i < again->num_numbers; ++i) again->steps[again->numbers[i]] = seq;
  for (int64_t i = 0; i < again->num_marks; ++i) again->steps[again->marks[i]] = events[1 + i];
  again->steps[again->seen_at] = again->seen_first + seq % again->seen_slots * again->seen_bytes;
  return cd_copies_behind(reinterpret_cast<const Step*>(again->steps), static_cast<int>(again->count), again->stream,
                          behind, reinterpret_cast<void*>(events[0]));
}
