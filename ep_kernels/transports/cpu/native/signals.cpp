// As much of Python's C API as signals need, found in the running interpreter: this library is built without Python's
// headers and loads without Python.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "exported.hpp"
#include "member.hpp"

namespace cd {
namespace {

struct Interpreter {
  int (*lock)();
  void (*unlock)(int);
  int (*check_signals)();                 // not 0: a handler has raised
  void (*fetch)(void**, void**, void**);  // type, value, traceback; no error is set then
  void (*restore)(void*, void*, void*);

  // False where this process has no Python.
  bool find() {
    return get(lock, "PyGILState_Ensure") && get(unlock, "PyGILState_Release") &&
           get(check_signals, "PyErr_CheckSignals") && get(fetch, "PyErr_Fetch") && get(restore, "PyErr_Restore");
  }

 private:
  template <typename F>
  static bool get(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  }
};

void *kept_type, *kept_value, *kept_trace;  // the main thread's

}  // namespace

bool signal_raised() {
  Interpreter python;
  if (syscall(SYS_gettid) != getpid() || !python.find()) return false;
  const int state = python.lock();
  const bool raised = python.check_signals() != 0;
  if (raised) python.fetch(&kept_type, &kept_value, &kept_trace);
  python.unlock(state);
  return raised;
}

}  // namespace cd

// With the interpreter's lock: sets the exception that a wait has kept.
CD_API void cd_raise_kept() {
  cd::Interpreter python;
  if (python.find()) python.restore(cd::kept_type, cd::kept_value, cd::kept_trace);
  cd::kept_type = cd::kept_value = cd::kept_trace = nullptr;
}
