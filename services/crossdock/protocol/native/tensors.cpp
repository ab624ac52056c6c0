// What the tensors of a call are, in one call from Python instead of a dozen of torch's functions, each of which takes
// microseconds where the caches have something else (docs/lab/expert-service.md).
#include <cstring>

#include "frames.hpp"
#include "python.hpp"

namespace {

constexpr uint32_t kFloat32 = 2 | 32 << 8 | 1 << 16, kFloat16 = 2 | 16 << 8 | 1 << 16;
constexpr uint32_t kBfloat16 = 4 | 16 << 8 | 1 << 16, kInt32 = 0 | 32 << 8 | 1 << 16, kInt64 = 0 | 64 << 8 | 1 << 16;
constexpr int kHost = 1;  // kDLCPU

python::Interpreter py;
const python::Exchange* exchange = nullptr;
python::Object* tensor_type = nullptr;

// A tensor, no kind of one, contiguous [T > 0, n > 0] in memory of the host.
bool is_usual(python::Object* given, python::Tensor* t) {
  python::Object* type = py.type_of(given);
  py.drop(type);  // its object keeps it
  if (type != tensor_type) return false;
  if (exchange->view(given, t)) return py.clear_error(), false;
  if (t->device_type != kHost || t->ndim != 2 || !t->data || t->shape[0] <= 0 || t->shape[1] <= 0) return false;
  if (!t->strides || t->shape[0] == 1) return !t->strides || t->shape[1] == 1 || t->strides[1] == 1;
  return t->strides[0] == t->shape[1] && (t->shape[1] == 1 || t->strides[1] == 1);
}

// Of the type of x, as frames say it; 0: none of theirs.
uint32_t code_of(uint32_t dtype) {
  return dtype == kFloat32 ? 1 : dtype == kBfloat16 ? 2 : dtype == kFloat16 ? 3 : 0;
}

uint64_t address(const python::Tensor& t) { return reinterpret_cast<uint64_t>(t.data) + t.byte_offset; }

}  // namespace

// Call first, with the interpreter lock, as the others: 0, or 1 where Python is not as it is declared here.
CD_API int cd_open_python() { return !py.find(); }

// Before `cd_describe`. `offered`: torch's DLPackExchangeAPI; `type`: torch.Tensor. 0, or 1 where it is another.
CD_API int cd_open_tensors(const python::Exchange* offered, python::Object* type) {
  if (offered->major != python::kMajor || !offered->view) return 1;
  exchange = offered;
  tensor_type = type;
  return 0;
}

// A request in one piece: header and fields, then the rows, as bytes.
CD_API python::Object* cd_packet(const char* head, uint64_t head_bytes, const cd::Rows* rows) {
  const uint64_t rows_bytes = rows->x_bytes + 8 * rows->num_ids;
  python::Object* whole = py.new_bytes(nullptr, python::Size(head_bytes + rows_bytes));
  if (!whole) return whole;
  char* bytes = py.bytes_of(whole);
  memcpy(bytes, head, head_bytes);
  cd_lay(reinterpret_cast<uint8_t*>(bytes) + head_bytes, rows);
  return whole;
}

// x, ids and weights of a call as the bytes of a `Described`; None: something about them is not usual, or they do not
// fit each other.
CD_API python::Object* cd_describe(python::Object* x, python::Object* ids, python::Object* weights) {
  python::Tensor a, b, c;
  const bool are_usual = is_usual(x, &a) && is_usual(ids, &b) && is_usual(weights, &c);
  const uint32_t dtype = are_usual ? code_of(a.dtype) : 0;
  if (!dtype || c.dtype != kFloat32 || (b.dtype != kInt32 && b.dtype != kInt64) || b.shape[0] != a.shape[0] ||
      c.shape[0] != a.shape[0] || b.shape[1] != c.shape[1] || a.shape[0] > UINT32_MAX || a.shape[1] > UINT32_MAX ||
      b.shape[1] > UINT16_MAX) {
    py.keep(py.none);
    return py.none;
  }
  const cd::Described told{address(a), address(b), address(c), uint32_t(a.shape[0]), uint32_t(a.shape[1]),
                           uint32_t(b.shape[1]), uint16_t(dtype), uint16_t(b.dtype == kInt64)};
  return py.new_bytes(reinterpret_cast<const char*>(&told), sizeof(told));
}
