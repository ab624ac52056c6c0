// An operation: its record is filled and its kernel launched, by one call from Python that looks at the arguments, too,
// or by two, of arguments that Python has checked.
//
// The one call takes what `Plan` says; of anything else it begins nothing and says None. Python then names what is
// wrong, or makes it right and calls `fill` and `launch`. So no error text is here.
#include <sched.h>

#include <atomic>
#include <cstring>

#include "launch.hpp"
#include "python.hpp"

namespace {

constexpr int kMostDims = 3, kMostTensors = 7, kMostAddresses = 24, kMostRecordBytes = 4096;
constexpr int64_t kTokens = -1, kRows = -2;  // instead of a length: that of the operation
constexpr uint32_t kOptional = 1, kAligned = 2, kMayBeWide = 4;  // wide: int64 instead of int32
constexpr uint32_t kInt64 = 0 | 64 << 8 | 1 << 16;
constexpr uint64_t kAlignment = 16;  // bytes, as the copy engine requires
constexpr int kLook = 256;           // spins between two looks at the watched words
constexpr int kLookFar = 1 << 16;    // and between two at the stream

python::Interpreter py;
const python::Exchange* exchange = nullptr;
python::Object* tensor_type = nullptr;

// What a tensor must be.
struct Expected {
  uint32_t dtype, flags;
  int32_t ndim, pad;
  int64_t shape[kMostDims];
};

// Where a call finds something, as an address: `offset` from base number `base`.
struct Place {
  uint32_t base, pad;
  uint64_t offset;
};
constexpr int kFormer = 1, kTensors = 5;  // bases: 0 = none, those of `State`, those of the tensors

// What a dispatch leaves to operations that follow it; Python keeps it as bytes.
struct State {
  uint64_t routing, routing_id, carried, weights;
  int64_t tokens, rows;
};

// `_PlanWords` of operation_plan.py.
struct Plan {
  Prepared launch;
  const unsigned char* record;  // of the launch, all but what is set below
  uint64_t record_bytes;
  uint64_t num_tokens_at;  // two int32: T, slot
  uint64_t addresses_at;
  uint64_t phases_at;   // of an operation in two launches, else 0
  uint64_t num_rows_at;  // the address of num_rows, with num_dropped behind it
  uint32_t num_addresses, num_tensors;
  Place addresses[kMostAddresses];
  Expected tensors[kMostTensors];
  Place state[4];
  uint32_t makes_state, takes_state;
  int64_t most_tokens, rows;  // `rows`: received, where no call knows better; -1 = as the numbers say
  const Quiet* quiet;
  void* context;                   // which must be current
  const volatile int64_t* stream;  // of the launch before, which must be the current one
  int32_t device_type, device_id;
  uint32_t not_captured, was_captured;
  volatile int32_t* numbers;  // pinned [2]: num_rows and num_dropped, to be waited for; or null
  Place copy_from, copy_to;   // float32 that are copied; base 0: none
  Prepared narrow;            // for a tensor that is wide; it copies those, too
  Place narrow_to;
  uint64_t token_words;  // numbers of each token in both
};
enum Phases : uint32_t { kSend = 1, kReceive = 2 };  // both: 3

// Whether it has all of its elements one behind the other in memory (an empty one needs none).
bool is_contiguous(const python::Tensor& t) {
  int64_t stride = 1;
  bool is_dense = t.data != nullptr;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] == 0) return true;
    if (t.shape[d] != 1 && t.strides && t.strides[d] != stride) is_dense = false;
    stride *= t.shape[d];
  }
  return is_dense;
}

// Whether an argument is what it must be; then its address, of a wide one `*wide`, too.
bool is_expected(const Plan* plan, const Expected& want, python::Object* given, State* op, uint64_t* address,
                 uint64_t* wide) {
  *address = 0;
  if (given == py.none) return want.flags & kOptional;
  python::Object* type = py.type_of(given);
  py.drop(type);  // its object keeps it
  if (type != tensor_type) return false;
  python::Tensor t;
  if (exchange->view(given, &t)) return py.clear_error(), false;
  const bool is_wide = (want.flags & kMayBeWide) && t.dtype == kInt64;
  if ((t.dtype != want.dtype && !is_wide) || t.ndim != want.ndim || t.device_type != plan->device_type ||
      t.device_id != plan->device_id)
    return false;
  if (op->tokens < 0 && want.shape[0] == kTokens) op->tokens = t.shape[0];  // the first tensor of a new routing
  for (int d = 0; d < t.ndim; ++d) {
    const int64_t length = want.shape[d];
    if (t.shape[d] != (length == kTokens ? op->tokens : length == kRows ? op->rows : length)) return false;
  }
  *address = reinterpret_cast<uint64_t>(t.data) + t.byte_offset;
  if (is_wide) *wide = *address;
  return is_contiguous(t) && !((want.flags & kAligned) && *address % kAlignment);
}

uint64_t at(const uint64_t* bases, const Place& place) { return bases[place.base] + place.offset; }  // base 0 is 0

// Waits until the kernel's numbers are there. False: it may be that they never come.
bool await(const Plan* plan, void* stream) {
  for (int spin = 1;; ++spin) {
    if (plan->numbers[0] >= 0 && plan->numbers[1] >= 0) return true;
    if (spin % kLook) continue;
    const bool is_over = !cd::is_quiet(plan->quiet) || (spin % kLookFar == 0 && !cd::is_busy(stream));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (is_over) return plan->numbers[0] >= 0 && plan->numbers[1] >= 0;
    if (spin % kLookFar == 0) sched_yield();
  }
}

// Whether an operation may begin, or go on, without another look; and the stream.
bool is_undisturbed(const Plan* plan, void** stream) {
  *stream = nullptr;
  if (!cd::is_quiet(plan->quiet) || cd::current_context() != plan->context) return false;
  if (plan->device_type == python::kCuda && exchange->stream(plan->device_type, plan->device_id, stream))
    return py.clear_error(), false;
  return reinterpret_cast<int64_t>(*stream) == *plan->stream && !(plan->not_captured && cd::is_captured(*stream));
}

// What a call keeps: its state, then its record. What Python gets of it is the state; of an operation in two launches,
// both.
struct Kept {
  State op;
  unsigned char record[kMostRecordBytes];

  template <typename T>
  void set(uint64_t at, const T& words) {
    memcpy(record + at, &words, sizeof(words));
  }
};
static_assert(offsetof(Kept, record) == sizeof(State), "Python reads them as one");

// Wide ids become narrow ones, and what is copied is, by one kernel in front.
int narrow(const Plan* plan, uint64_t ids, uint64_t to, uint64_t from, uint64_t copy, void* stream, int32_t count) {
  void* arguments[] = {&ids, &to, &count, &from, &copy};
  return count ? cd_launch(&plan->narrow, stream, arguments) : 0;
}

// The driver's status. `phases`: of an operation in two launches. The last one brings the numbers, where they are
// waited for; `op.rows` is -1 where they were in vain.
int launch(Plan* plan, void* stream, uint32_t phases, Kept* kept) {
  if (plan->phases_at) kept->set(plan->phases_at, phases);
  const bool reads = plan->numbers && phases != kSend;
  if (reads) plan->numbers[0] = plan->numbers[1] = -1;
  int status = cd_launch_one(&plan->launch, stream, kept->record);
  if (status == kCaptured) {
    plan->was_captured = 1;
    status = 0;
  }
  if (status || !reads) return status;
  uint64_t from;
  memcpy(&from, kept->record + plan->num_rows_at, sizeof(from));
  const auto to = reinterpret_cast<uint64_t>(plan->numbers);
  const bool have_come = !cd::copy(to, from, 2 * sizeof(int32_t), stream) && await(plan, stream);
  if (!have_come) kept->op.rows = -1;
  else if (kept->op.rows < 0) kept->op.rows = plan->numbers[0];
  return 0;
}

// Both phases, or the first of two. The driver's status. `wide`: address of the wide ids, or 0.
int start(Plan* plan, const uint64_t* bases, uint64_t wide, void* stream, Kept* kept) {
  const uint64_t from = at(bases, plan->copy_from), to = at(bases, plan->copy_to);
  const auto count = static_cast<int32_t>(kept->op.tokens * plan->token_words);
  const uint32_t phases = plan->phases_at ? kSend : kSend | kReceive;
  if (wide) {
    const int status = narrow(plan, wide, at(bases, plan->narrow_to), from, to, stream, count);
    return status ? status : launch(plan, stream, phases, kept);
  }
  const int status = launch(plan, stream, phases, kept);
  return status || !from || !count ? status : cd::copy(to, from, count * sizeof(float), stream);
}

// The record of the plan and, of a plan that takes one, the state of a former dispatch. False: that is none.
bool begin(const Plan* plan, python::Object* former, uint64_t* bases, Kept* kept) {
  kept->op = {0, 0, 0, 0, -1, plan->rows};
  memcpy(kept->record, plan->record, plan->record_bytes);
  if (!plan->takes_state) return true;
  const char* words = py.bytes_of(former);
  if (!words) return py.clear_error(), false;
  memcpy(&kept->op, words, sizeof(State));
  memcpy(bases + kFormer, words, 4 * sizeof(uint64_t));
  return true;
}

// What a call sets in them. False: more tokens than the plan has room for.
bool fill(const Plan* plan, python::Object* slot, const uint64_t* bases, Kept* kept) {
  if (kept->op.tokens < 0 || kept->op.tokens > plan->most_tokens) return false;
  kept->set(plan->num_tokens_at, static_cast<int32_t>(kept->op.tokens));
  kept->set(plan->num_tokens_at + sizeof(int32_t), static_cast<int32_t>(py.as_integer(slot)));
  for (uint32_t i = 0; i < plan->num_addresses; ++i)
    kept->set(plan->addresses_at + i * sizeof(uint64_t), at(bases, plan->addresses[i]));
  if (!plan->makes_state) return true;
  uint64_t made[4];
  for (int i = 0; i < 4; ++i) made[i] = at(bases, plan->state[i]);
  memcpy(&kept->op, made, sizeof(made));
  return true;
}

python::Object* bytes_of(const Kept& kept, size_t record_bytes) {
  return py.new_bytes(reinterpret_cast<const char*>(&kept), sizeof(State) + record_bytes);
}

// (slot, state of a former dispatch or None, tensors...) -> what Python gets of `Kept` (0 where that is nothing), the
// driver's status where it is not 0, or None.
python::Object* call(python::Object* self, python::Object* const* given, python::Size count) {
  auto* plan = static_cast<Plan*>(py.as_pointer(self));
  python::Object* none = (py.keep(py.none), py.none);
  void* stream;
  if (!exchange || count != plan->num_tensors + 2 || !is_undisturbed(plan, &stream)) return none;
  Kept kept;
  uint64_t bases[kTensors + kMostTensors] = {};
  if (!begin(plan, given[1], bases, &kept)) return none;
  // The tensors are what the plan was made for; int64 ids go through memory of the plan's.
  uint64_t wide = 0, wide_base = 0;
  for (uint32_t i = 0; i < plan->num_tensors; ++i) {
    const uint64_t before = wide;
    if (!is_expected(plan, plan->tensors[i], given[i + 2], &kept.op, &bases[kTensors + i], &wide)) return none;
    if (wide != before) wide_base = kTensors + i;
  }
  if (wide) bases[wide_base] = at(bases, plan->narrow_to);
  if (!fill(plan, given[0], bases, &kept)) return none;
  // Launch, while other threads run Python.
  void* thread = py.leave();
  const int status = start(plan, bases, wide, stream, &kept);
  py.enter(thread);
  py.drop(none);
  if (status || !(plan->makes_state || plan->phases_at)) return py.new_integer(status);
  return bytes_of(kept, plan->phases_at ? plan->record_bytes : 0);
}

// (slot, state of a former dispatch or None, T, addresses of tensors or 0...) -> `Kept`, of which nothing is launched;
// None: more tokens than the plan has room for.
python::Object* filled(python::Object* self, python::Object* const* given, python::Size count) {
  auto* plan = static_cast<Plan*>(py.as_pointer(self));
  Kept kept;
  uint64_t bases[kTensors + kMostTensors] = {};
  bool is_good = count == plan->num_tensors + 3 && begin(plan, given[1], bases, &kept);
  if (is_good) {
    kept.op.tokens = py.as_integer(given[2]);
    for (uint32_t i = 0; i < plan->num_tensors; ++i)
      bases[kTensors + i] = static_cast<uint64_t>(py.as_integer(given[i + 3]));
    is_good = fill(plan, given[0], bases, &kept);
  }
  return is_good ? bytes_of(kept, plan->record_bytes) : (py.keep(py.none), py.none);
}

// (what `call` or `filled` gave, phases, CUstream) -> the state, the driver's status where it is not 0, or None:
// nothing was launched. CUstream None: the current one, where nothing speaks against a launch.
python::Object* launched(python::Object* self, python::Object* const* given, python::Size count) {
  auto* plan = static_cast<Plan*>(py.as_pointer(self));
  python::Object* none = (py.keep(py.none), py.none);
  void* stream;
  const char* bytes = count == 3 ? py.bytes_of(given[0]) : nullptr;
  if (!bytes) return py.clear_error(), none;
  if (given[2] != py.none) stream = py.as_pointer(given[2]);
  else if (!exchange || !is_undisturbed(plan, &stream)) return none;
  Kept kept;
  memcpy(&kept, bytes, sizeof(State) + plan->record_bytes);
  const auto phases = static_cast<uint32_t>(py.as_integer(given[1]));
  void* thread = py.leave();
  const int status = launch(plan, stream, phases, &kept);
  py.enter(thread);
  py.drop(none);
  return status ? py.new_integer(status) : bytes_of(kept, 0);
}

python::Method methods[] = {
    {"call", call, python::kFastCall, nullptr},
    {"fill", filled, python::kFastCall, nullptr},
    {"launch", launched, python::kFastCall, nullptr},
};

}  // namespace

CD_API size_t cd_operation_plan_bytes() { return sizeof(Plan); }

// Call first. `offered`: torch's DLPackExchangeAPI, or null; `type`: torch.Tensor. 0, or 1 where Python is not as it is
// declared here. Without an exchange that is, `call` always says None.
CD_API int cd_operation_open(const python::Exchange* offered, python::Object* type) {
  if (!py.find()) return 1;
  exchange = offered && offered->major == python::kMajor && offered->view && offered->stream ? offered : nullptr;
  tensor_type = type;
  return 0;
}

// One of `methods`, of one plan, for as long as the plan lives. With the GIL.
CD_API python::Object* cd_operation(Plan* plan, int which) {
  python::Object* self = py.new_integer(reinterpret_cast<long long>(plan));
  python::Object* made = py.new_function(&methods[which], self, nullptr, nullptr);
  py.drop(self);
  return made;
}
