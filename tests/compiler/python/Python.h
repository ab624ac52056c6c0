// What inductor's bindings use of CPython's stable ABI, for machines without the headers of Python.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef ptrdiff_t Py_ssize_t;
typedef struct _object PyObject;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);

struct PyMethodDef {
  const char* name;
  PyCFunction call;
  int flags;
  const char* doc;
};

struct PyModuleDef_Base {
  Py_ssize_t references;
  void *type, *init;
  Py_ssize_t index;
  void* copy;
};

struct PyModuleDef {
  PyModuleDef_Base base;
  const char *name, *doc;
  Py_ssize_t size;
  PyMethodDef* methods;
  void *slots, *traverse, *clear, *free;
};

#define PyModuleDef_HEAD_INIT {1, 0, 0, 0, 0}
#define METH_FASTCALL 0x0080
#define PyMODINIT_FUNC extern "C" __attribute__((visibility("default"))) PyObject*
#define PyModule_Create(module) PyModule_Create2(module, 1013)
#define Py_RETURN_NONE return Py_IncRef(&_Py_NoneStruct), &_Py_NoneStruct

extern "C" {
extern struct _object _Py_NoneStruct;
extern PyObject* PyExc_RuntimeError;
void Py_IncRef(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject*, const char*);
PyObject* PyModule_Create2(PyModuleDef*, int);
Py_ssize_t PyLong_AsSsize_t(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
double PyFloat_AsDouble(PyObject*);
}
