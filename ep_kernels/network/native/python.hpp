// As much of Python's stable ABI, and of the DLPack exchange that torch offers beside it, as one call needs. Declared
// here and found in the running interpreter: the library is built without Python's headers and loads without Python.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

namespace python {

struct Object;  // PyObject
using Size = ptrdiff_t;
using FastCall = Object* (*)(Object* self, Object* const* arguments, Size count);

// PyMethodDef.
struct Method {
  const char* name;
  FastCall call;
  int flags;
  const char* text;
};
constexpr int kFastCall = 0x80;  // METH_FASTCALL: part of the stable ABI since 3.10

struct Interpreter {
  Object* none;
  Object* (*new_function)(Method*, Object* self, Object* module, Object* type);
  Object* (*new_integer)(long long);
  Object* (*new_bytes)(const char*, Size);
  void* (*as_pointer)(Object*);
  long long (*as_integer)(Object*);
  char* (*bytes_of)(Object*);
  Object* (*type_of)(Object*);
  void (*keep)(Object*);
  void (*drop)(Object*);
  void (*clear_error)();
  void* (*leave)();       // PyEval_SaveThread: other threads may run
  void (*enter)(void*);

  // False where this process has no Python, or none that has all of it.
  bool find() {
    return get(none, "_Py_NoneStruct") && get(new_function, "PyCMethod_New") &&
           get(new_integer, "PyLong_FromLongLong") && get(new_bytes, "PyBytes_FromStringAndSize") &&
           get(as_pointer, "PyLong_AsVoidPtr") && get(as_integer, "PyLong_AsLongLong") &&
           get(bytes_of, "PyBytes_AsString") && get(type_of, "PyObject_Type") && get(keep, "Py_IncRef") &&
           get(drop, "Py_DecRef") && get(clear_error, "PyErr_Clear") && get(leave, "PyEval_SaveThread") &&
           get(enter, "PyEval_RestoreThread");
  }

 private:
  template <typename F>
  static bool get(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  }
};

// DLTensor.
struct Tensor {
  unsigned char* data;
  int32_t device_type, device_id, ndim;
  uint32_t dtype;  // code, bits and lanes, the lowest first
  const int64_t* shape;
  const int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, dtype) == 20 && offsetof(Tensor, strides) == 32, "DLTensor");

// DLPackExchangeAPI.
struct Exchange {
  uint32_t major, minor;
  void* former;
  void* unused[3];
  int (*view)(Object* tensor, Tensor* out);  // 0, or an error is set
  int (*stream)(int device_type, int32_t device_id, void** out);
};
constexpr uint32_t kMajor = 1;
constexpr int kCuda = 2;  // kDLCUDA

}  // namespace python
