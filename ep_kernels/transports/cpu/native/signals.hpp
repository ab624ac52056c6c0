// Python runs handlers of signals between two of its instructions, on its main thread, so not while that one waits
// here.
#pragma once

namespace cd {

// Runs the handlers that are due, on the main thread; elsewhere, and without Python, nothing. True: one has raised an
// exception, which is kept for `raise_kept`.
bool signal_raised();

}  // namespace cd
